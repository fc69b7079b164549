#include "slots.hpp"

#include <algorithm>

namespace pdnode {

namespace {

// bits 0–39 count · 40–47 generation of the present or last use · 48… flags · 56–63 generation of
// what came early
constexpr uint64_t kCount = (uint64_t{1} << 40) - 1;
constexpr uint64_t kArmed = uint64_t{1} << 48;
constexpr uint64_t kUsed = uint64_t{1} << 49;
constexpr uint64_t kReached = uint64_t{1} << 50;
constexpr uint64_t kOver = uint64_t{1} << 51;
constexpr uint64_t kEarly = uint64_t{1} << 52;
constexpr uint64_t kDead = uint64_t{1} << 53;

// A peer may send without end: a full count stays full and does not run into the generation.
constexpr uint64_t plus(uint64_t state, uint32_t weight) {
  return (state & ~kCount) | std::min((state & kCount) + weight, kCount);
}
static_assert(plus(kUsed | 5, 3) == (kUsed | 8));
static_assert(plus(kUsed | (kCount - 1), 4095) == (kUsed | kCount));

constexpr uint32_t generation_of(uint64_t state) { return (state >> 40) & 0xff; }
constexpr uint32_t early_generation_of(uint64_t state) { return state >> 56; }
constexpr uint64_t with_generation(uint32_t generation) { return uint64_t{generation} << 40; }

// Generations wrap; half of them lie ahead, half behind.
constexpr bool is_newer(uint32_t generation, uint32_t than) {
  return static_cast<int8_t>(generation - than) > 0;
}

uint64_t mark(uint64_t state, uint64_t expected, SlotOutcome* outcome) {
  const uint64_t count = state & kCount;
  outcome->count = count;
  if (count >= expected && (state & kReached) == 0) {
    outcome->reached = true;
    state |= kReached;
  }
  if (count > expected && (state & kOver) == 0) {
    outcome->overshoot = true;
    state |= kOver;
  }
  return state;
}

}  // namespace

SlotOutcome SlotTable::count(Immediate immediate) {
  Slot& slot = slots_[immediate.slot];
  uint64_t state = slot.state.load(std::memory_order_acquire);
  while (true) {
    SlotOutcome outcome;
    uint64_t next = 0;
    if ((state & kArmed) != 0) {
      if ((state & kDead) != 0 || immediate.generation != generation_of(state)) {
        outcome.late = true;
        return outcome;
      }
      outcome.session = slot.session.load(std::memory_order_relaxed);
      next = mark(plus(state, immediate.weight), slot.expected.load(std::memory_order_relaxed),
                  &outcome);
    } else {
      const bool has_early = (state & kEarly) != 0;
      const bool behind =
          ((state & kUsed) != 0 && !is_newer(immediate.generation, generation_of(state))) ||
          (has_early && is_newer(early_generation_of(state), immediate.generation));
      if (behind) {
        outcome.late = true;
        return outcome;
      }
      outcome.early = true;
      if (has_early && early_generation_of(state) == immediate.generation) {
        next = plus(state, immediate.weight);
      } else {
        next = (state & (kUsed | with_generation(0xff))) | kEarly |
               (uint64_t{immediate.generation} << 56) | immediate.weight;
      }
    }
    if (slot.state.compare_exchange_weak(state, next, std::memory_order_acq_rel,
                                         std::memory_order_acquire)) {
      return outcome;
    }
  }
}

SlotOutcome SlotTable::arm(int index, int generation, int64_t session, uint64_t expected,
                           bool dead) {
  Slot& slot = slots_[index];
  // Only an armed slot's expectation is read, so these are seen whole once the word below is set.
  slot.expected.store(expected, std::memory_order_relaxed);
  slot.session.store(session, std::memory_order_relaxed);
  uint64_t state = slot.state.load(std::memory_order_acquire);
  while (true) {
    SlotOutcome outcome;
    outcome.session = session;
    const bool early = (state & kEarly) != 0 &&
                       early_generation_of(state) == static_cast<uint32_t>(generation);
    uint64_t next = (early ? state & kCount : 0) | kArmed | kUsed |
                    with_generation(static_cast<uint32_t>(generation));
    next = dead ? next | kDead : mark(next, expected, &outcome);
    if (slot.state.compare_exchange_weak(state, next, std::memory_order_acq_rel,
                                         std::memory_order_acquire)) {
      return outcome;
    }
  }
}

bool SlotTable::armed(int index) const {
  return (slots_[index].state.load(std::memory_order_acquire) & kArmed) != 0;
}

uint64_t SlotTable::counted(int index) const {
  const uint64_t state = slots_[index].state.load(std::memory_order_acquire);
  return (state & kArmed) != 0 ? state & kCount : 0;
}

bool SlotTable::disarm(int index) {
  Slot& slot = slots_[index];
  uint64_t state = slot.state.load(std::memory_order_acquire);
  do {
    if ((state & kArmed) == 0) return false;
  } while (!slot.state.compare_exchange_weak(state,
                                             kUsed | (state & with_generation(0xff)),
                                             std::memory_order_acq_rel,
                                             std::memory_order_acquire));
  return true;
}

void SlotTable::kill(int64_t session) {
  for (Slot& slot : slots_) {
    uint64_t state = slot.state.load(std::memory_order_acquire);
    uint64_t next = 0;
    do {
      next = state;
      if ((state & kArmed) != 0) {
        if (slot.session.load(std::memory_order_relaxed) == session) next |= kDead;
      } else if ((state & kEarly) != 0) {
        next = state & (kUsed | with_generation(0xff));
      }
      if (next == state) break;
    } while (!slot.state.compare_exchange_weak(state, next, std::memory_order_acq_rel,
                                               std::memory_order_acquire));
  }
}

}  // namespace pdnode
