// Immediates: `slot (12 bits) | generation (8) | weight (12)`, one 64-bit counter per slot.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace pdnode {

constexpr int kSlots = 4096;  // slot 0 is reserved for probes and the self-test

struct Immediate {
  explicit Immediate(uint32_t value)
      : slot(value >> 20), generation((value >> 12) & 0xff), weight(value & 0xfff) {}
  uint32_t slot, generation, weight;
};

struct SlotOutcome {
  bool early = false;      // came before arm()
  bool late = false;       // dropped: an old generation, or its session is fenced
  bool reached = false;    // this one brought the count to what is expected
  bool overshoot = false;  // this one brought it above, for the first time
  int64_t session = -1;    // owner of the slot, −1 if not armed
  uint64_t count = 0;
};

// All states change by compare-and-swap of one word, because the progress threads of several
// groups count the same slot while Python arms it. A flag in that word makes sure that `reached`
// and `overshoot` are said once, whichever thread is first.
class SlotTable {
 public:
  SlotOutcome count(Immediate immediate);                                      // progress threads
  SlotOutcome arm(int slot, int generation, int64_t session, uint64_t expected, bool dead);
  bool disarm(int slot);  // false: it was not armed
  bool armed(int slot) const;
  uint64_t counted(int slot) const;  // since it was armed, what came early included
  // The session is fenced: nothing counts for its slots any more. What came early is dropped as
  // well, since nobody can tell whose it was.
  void kill(int64_t session);

 private:
  struct Slot {
    std::atomic<uint64_t> state{0};
    std::atomic<uint64_t> expected{0};
    std::atomic<int64_t> session{-1};
  };
  std::array<Slot, kSlots> slots_;
};

}  // namespace pdnode
