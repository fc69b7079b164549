// Regions larger than one registration may be. The memory is sparse: only what is sent is there.

#include <cstdlib>
#include <cstring>

#include "scenario.hpp"

namespace pdnode::test {

namespace {

constexpr uint64_t kMib = 1 << 20;

void check_pieces(const std::vector<RemotePiece>& pieces, const Shape& shape, uint64_t most) {
  uint64_t end = 0;
  for (const RemotePiece& one : pieces) {
    check(one.offset == end && one.length <= most, "a piece is too long or leaves a gap");
    check(one.offset % shape.page_bytes == 0, "a page straddles two registrations");
    end += one.length;
  }
  check(end == shape.bytes(), "the pieces do not cover the region");
}

// Neighbours on both sides of a boundary: merged where they may be, each page whole.
void push_across(Node& sender, Node& target, uint64_t boundary) {
  constexpr uint64_t kCount = 6;
  const uint64_t first = boundary - kCount / 2;
  for (uint64_t i = 0; i < kCount; ++i) {
    std::memset(sender.page(first + i, 0), static_cast<int>(17 + i), sender.shape.page_bytes);
  }
  target.fabric->arm(1, 0, 1, kCount);
  sender.fabric->open_transfer(1, 1, 1 << 20);
  sender.fabric->submit(program_of(sender, target, 1), {{first, first, kCount}});
  sender.fabric->finish(1);
  target.wait(EventKind::kReached, 1);
  sender.wait(EventKind::kDrained, 1);
  for (uint64_t i = 0; i < kCount; ++i) {
    check(std::memcmp(sender.page(first + i, 0), target.page(first + i, 0),
                      sender.shape.page_bytes) == 0,
          "a page beside a boundary is not there");
  }
}

// Each session has registrations of its own: the NIC's table fills up, and says so before the
// device does.
void fill_nic(Node& target) {
  for (int64_t session = 2; session < 100; ++session) {
    target.fabric->open_session(session, {0}, {target.region}, "0123456789abcdef");
    Event event;
    until(
        [&] {
          return target.take(EventKind::kLost, session, &event) ||
                 target.take(EventKind::kOpened, session, &event);
        },
        "neither lost nor opened");
    if (event.kind == EventKind::kOpened) continue;
    check(event.text.find("above the limit of 24000000") != std::string::npos,
          "lost says: " + event.text);
    check(session > 5, "the NIC was full too early");
    return;
  }
  check(false, "the NIC never was full");
}

}  // namespace

void wide_regions(const Fake& fake, const std::string& library) {
  for (const uint64_t page_bytes : {kMib, 3 * kMib}) {
    fake.personality("efa");
    const Shape shape{9 * 1024 * kMib / page_bytes, page_bytes, 1};
    const uint64_t most = uint64_t{4} << 30;
    Node sender(library, "efa", shape), target(library, "efa", shape);
    join(sender, target, 1, 0);
    check_pieces(target.described(1)[0].pieces[0], shape, most);
    check(target.fabric->nics().front()->account.registrations.load() == 3 + 3 + 1,
          "the NIC's account is wrong");
    push_across(sender, target, most / page_bytes);
    fill_nic(target);
    check(fake.violations().empty(), "violations: " + fake.violations());
  }
  check(fake.count("mr") == 0, "registrations are left");
}

// By dma-buf where the library is new enough for it; an older one never sees any of it.
void device_memory(const Fake& fake, const std::string& library, const std::string& provider) {
  fake.personality(provider);
  const Shape shape{64, 4096, 1};
  const char* minor = std::getenv("FAKE_FABRIC_MINOR");
  if (minor != nullptr && std::atoi(minor) < 20) {
    std::string text;
    try {
      const Node refused(library, provider, shape, 60, true);
    } catch (const FabricError& error) {
      text = error.what();
    }
    check(text.find("; 1.20 or newer is needed (dma-buf)") != std::string::npos,
          "an old library takes memory of a device: " + text);
    check(fake.count("hmem") == 0, "an old library was asked for memory of a device");
    return;
  }
  {
    Node sender(library, provider, shape, 60, true), target(library, provider, shape, 60, true);
    join(sender, target, 1, 0);
    push_across(sender, target, shape.pages / 2);
    check(fake.count("by_attributes") >= 2, "the memory of a device was registered as the host's");
    check(fake.violations().empty(), "violations: " + fake.violations());
  }
  check(fake.count("mr") == 0, "registrations are left");
}

}  // namespace pdnode::test
