// The core's own suite without Python, for the fake libfabric (with all its faults) or a real one
// (exchanges only), under sanitizers or not.
//
//   pdnode_native_test LIBRARY PERSONALITY FIRST_SEED SEEDS
//
// PERSONALITY: efa, verbs or worse of the fake, or a provider of a real library. Ends with 1 and
// the seed at the first thing that is wrong.

#include <cstdio>
#include <cstdlib>
#include <map>

#include "scenario.hpp"

namespace pdnode::test {

namespace {

const char* const kObjects[] = {"fabric", "domain", "mr", "cq", "eq", "av", "ep", "pep", "request"};

// Seeds that take seconds.
constexpr uint64_t kPatient = 99, kSilent = 199;

Shape shape_of(uint64_t seed) {
  std::mt19937_64 chance(seed * 977);
  constexpr uint64_t kPageBytes[] = {8, 24, 64, 512, 4096, 16384};
  Shape shape;
  shape.page_bytes = kPageBytes[chance() % 6];
  shape.pages = 8 + chance() % 90;
  shape.layers = 1 + chance() % 4;
  return shape;
}

std::string provider_of(const std::string& personality, uint64_t seed) {
  if (personality != "worse") return personality;
  return seed % 2 == 0 ? "tcp" : "tcp-rdm";
}

// What differs between two devices of one kind.
void vary(const Fake& fake, const std::string& personality, uint64_t seed) {
  std::mt19937_64 chance(seed * 31);
  fake.personality(personality);
  fake.set("seed", static_cast<int64_t>(seed));
  if (personality == "worse") {
    fake.set("segments", 1 + static_cast<int64_t>(chance() % 4));
    fake.set("again_permille", static_cast<int64_t>(chance() % 500));
    fake.set("never_blocks", static_cast<int64_t>(chance() % 2));
    fake.set("wait_fd", static_cast<int64_t>(chance() % 2));
    fake.set("local_registration", static_cast<int64_t>(chance() % 2));
    fake.set("virtual_addresses", static_cast<int64_t>(chance() % 2));
  } else {
    fake.set("segments", 1 + static_cast<int64_t>(chance() % 2));
    fake.set("again_permille", static_cast<int64_t>(chance() % 100));
    if (personality == "efa") fake.set("posts_receives", static_cast<int64_t>(chance() % 2));
  }
  if (chance() % 3 == 0) fake.set("message_bytes", 16384 + static_cast<int64_t>(chance() % 65536));
}

void run_seed(const Fake& fake, const std::string& library, const std::string& personality,
              uint64_t seed) {
  vary(fake, personality, seed);
  std::map<std::string, int64_t> before;
  for (const char* kind : kObjects) before[kind] = fake.count(kind);
  {
    Scenario s(fake, library, provider_of(personality, seed), shape_of(seed), seed,
               fake.there() && seed == kSilent ? kSilenceS : 60);
    s.open(s.below(2) == 0 ? 0 : 1 + static_cast<uint64_t>(s.below(9)));
    exchange(s);
    if (fake.there()) fault(s, static_cast<int>(seed % static_cast<uint64_t>(kFaults)));
    if (fake.there() && seed == kPatient) patience(s);
    if (fake.there() && seed == kSilent) silent_device(s);
    if (fake.there() && seed % 50 == 24) many_sessions(s);
    if (fake.there() && seed % 10 == 2) early_probe(s);
    if (fake.there() && seed % 10 == 4) closed_listener(s);
    if (fake.there() && seed % 50 == 49) dead_queue(s);
    const bool fails = fake.there() && seed % 10 == 3;
    if (fails) fake.set("close_fails_next", 1);
    const std::string text = s.sender.fabric->close().text();
    check(fails == (text.find("fi_close: ") == 0), "close says: " + text);
    check(!s.target.fabric->close(), "a fabric was not closed");
  }
  fake.settle();
  // tcp-rdm: an endpoint that could still be connecting stays open until the process ends.
  for (const char* kind : kObjects) {
    check(fake.count(kind) == before[kind] || provider_of(personality, seed) == "tcp-rdm",
          std::string("objects are left: ") + kind);
  }
  check(fake.violations().empty(), "violations: " + fake.violations());
}

}  // namespace

}  // namespace pdnode::test

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: pdnode_native_test LIBRARY PERSONALITY FIRST_SEED SEEDS\n");
    return 64;
  }
  const pdnode::test::Fake fake(argv[1]);
  const uint64_t first = std::strtoull(argv[3], nullptr, 10);
  const uint64_t seeds = std::strtoull(argv[4], nullptr, 10);
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    try {
      if (seed == 0 && std::string(argv[2]) == "efa") pdnode::test::wide_regions(fake, argv[1]);
      if (seed == 0 && fake.there() && std::string(argv[2]) != "worse") {
        pdnode::test::device_memory(fake, argv[1], argv[2]);
      }
      if (seed == 0 && fake.there()) {
        fake.personality(argv[2]);
        pdnode::test::window(fake, argv[1], pdnode::test::provider_of(argv[2], seed));
      }
      pdnode::test::run_seed(fake, argv[1], argv[2], seed);
    } catch (const std::exception& error) {
      std::printf("%s, seed %llu: %s\n", argv[2], static_cast<unsigned long long>(seed),
                  error.what());
      return 1;
    }
  }
  std::printf("%s: %llu seeds passed\n", argv[2], static_cast<unsigned long long>(seeds));
  return 0;
}
