// The core without Python, for sanitizers: two fabrics in one process exchange pages, fence each
// other at random moments of set-up and transfer, and end clean. Usage: pdnode_core_test LIBRARY
// [PROVIDER] [ROUNDS].

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fabric.hpp"

namespace pdnode {
namespace {

constexpr uint64_t kPageBytes = 16384;
constexpr uint64_t kPages = 64;
constexpr uint64_t kBytes = kPages * kPageBytes;

[[noreturn]] void give_up(const std::string& what) {
  std::fprintf(stderr, "pdnode_core_test: %s\n", what.c_str());
  std::abort();
}

void check(bool condition, const char* what) {
  if (!condition) give_up(what);
}

class Node {
 public:
  Node(const std::string& library, const std::string& provider)
      : fabric(std::make_unique<Fabric>(library, provider, "adaptive")) {
    fabric->add_group({{"lo", "127.0.0.1"}}, -1);
    if (provider == "tcp") port_ = fabric->listen(0, "127.0.0.1", 0);
    fd_.reset(memfd_create("kv", MFD_CLOEXEC));
    check(ftruncate(fd_.get(), kBytes) == 0, "ftruncate");
    memory = static_cast<uint8_t*>(
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0));
    region = fabric->keep_region(fabric->begin_region(0, fd_.get(), kBytes, kPageBytes));
  }
  ~Node() {
    if (Error error = fabric->close()) give_up(error.text());
    munmap(memory, kBytes);
  }

  bool saw(EventKind kind, int64_t number) {
    for (Event& event : fabric->take_events(1000)) events_.push_back(std::move(event));
    for (const Event& event : events_) {
      const bool of_transfer = event.transfer >= 0;
      if (event.kind == kind && (of_transfer ? event.transfer : event.session) == number) {
        return true;
      }
    }
    return false;
  }

  void wait(EventKind kind, int64_t number) {
    const int64_t deadline = now_ns() + 20'000'000'000;
    while (!saw(kind, number)) {
      if (now_ns() > deadline) give_up(std::string("no ") + kEventNames[static_cast<int>(kind)]);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  std::string address(int64_t session) {
    if (port_ != 0) return "127.0.0.1:" + std::to_string(port_);
    return fabric->endpoint_name(session, 0);
  }

  RemoteTable described(int64_t session) {
    RemoteTable table;
    for (const Descriptor& one : fabric->descriptors(session)) {
      table[one.region < 0 ? kScratch : 0].pieces[one.nic].push_back(
          {one.offset, one.length, one.base, one.key});
    }
    return table;
  }

  std::unique_ptr<Fabric> fabric;
  uint8_t* memory = nullptr;
  int region = -1;

 private:
  Fd fd_;
  int port_ = 0;
  std::vector<Event> events_;
};

SubmitArguments all_pages(int64_t transfer, int region) {
  SubmitArguments arguments;
  arguments.transfer = transfer;
  arguments.layers = 1;
  arguments.region = region;
  arguments.source_layer_stride = arguments.remote_layer_stride = kBytes;
  arguments.source_page_stride = arguments.remote_page_stride = kPageBytes;
  arguments.length = kPageBytes;
  return arguments;
}

// Takes the steps of set-up as they become possible until `deadline`; true once probed.
bool set_up(Node& sender, Node& target, int64_t session, bool rdm, int64_t deadline) {
  const std::string token(16, static_cast<char>('a' + session % 26));
  sender.fabric->open_session(session, {0}, {}, token);
  target.fabric->open_session(session, {0}, {target.region}, token);
  int step = 0;
  while (now_ns() < deadline) {
    const auto both = [&](EventKind kind) {
      return sender.saw(kind, session) && target.saw(kind, session);
    };
    if (step == 0 && both(EventKind::kOpened)) {
      target.fabric->connect(session, {0, 0}, sender.address(session), 5);
      if (rdm) sender.fabric->connect(session, {0, 0}, target.address(session), 5);
      step = 1;
    } else if (step == 1 && both(EventKind::kConnected)) {
      sender.fabric->set_remote(session, target.described(session));
      target.fabric->set_remote(session, sender.described(session));
      sender.fabric->probe(session);
      target.fabric->probe(session);
      step = 2;
    } else if (step == 2 && both(EventKind::kProbed)) {
      return true;
    }
  }
  return false;
}

void run(const std::string& library, const std::string& provider, int rounds) {
  Node sender(library, provider), target(library, provider);
  std::mt19937 chance(1);
  const bool rdm = provider != "tcp";
  for (int round = 1; round <= rounds; ++round) {
    const bool whole = round % 4 == 0;
    const int64_t patience = whole ? 10'000'000'000 : chance() % 4'000'000;
    const bool up = set_up(sender, target, round, rdm, now_ns() + patience);
    check(up || !whole, "no set-up within 10 s");
    if (up) {
      for (uint64_t i = 0; i < kBytes; ++i) sender.memory[i] = static_cast<uint8_t>(i * 31 + round);
      target.fabric->arm(1, round & 0xff, round, kPages);
      sender.fabric->open_transfer(round, round, 1 << 20 | (round & 0xff) << 12);
      std::vector<Span> spans;
      for (uint64_t page = 0; page < kPages; ++page) spans.push_back({page, kPages - 1 - page, 1});
      sender.fabric->submit(all_pages(round, sender.region), spans);
      sender.fabric->finish(round);
      if (whole) {
        target.wait(EventKind::kReached, round);
        sender.wait(EventKind::kDrained, round);
        check(std::memcmp(sender.memory, target.memory + kBytes - kPageBytes, kPageBytes) == 0,
              "payload changed");
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(chance() % 500));
      }
    }
    Node& first = chance() % 2 == 0 ? sender : target;
    Node& second = &first == &sender ? target : sender;
    for (Node* node : {&first, &second}) {
      node->fabric->fence(round, std::nullopt);
      node->wait(EventKind::kFenced, round);
    }
    if (!up) continue;
    target.fabric->disarm(1);
    while (!sender.saw(EventKind::kDrained, round) && !sender.saw(EventKind::kSettled, round)) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    sender.fabric->close_transfer(round);
  }
}

}  // namespace
}  // namespace pdnode

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: pdnode_core_test LIBRARY [PROVIDER] [ROUNDS]\n");
    return 64;
  }
  try {
    pdnode::run(argv[1], argc > 2 ? argv[2] : "tcp", argc > 3 ? std::atoi(argv[3]) : 200);
  } catch (const pdnode::FabricError& error) {
    std::fprintf(stderr, "pdnode_core_test: %s\n", error.what());
    return 1;
  }
  std::printf("ok\n");
  return 0;
}
