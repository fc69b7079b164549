// The window of a connection: it fills in bursts, and nothing that may go at once waits for one.

#include <cstring>

#include "scenario.hpp"

namespace pdnode::test {

namespace {

class Window {
 public:
  Window(const Fake& fake, const std::string& library, const std::string& provider)
      : s_(fake, library, provider, {1024, 64, 1}, 1),
        size_(s_.sender.fabric->posting().window_writes) {
    s_.open(0);
    fake.settle();
  }

  void bursts() {
    hold();
    const int64_t bulk = push(size_ + size_ / 2 + 5);
    posts(size_, "a window was not filled");
    land(size_ / 2 - 1);
    stays(size_, "a window was refilled before half of it had come back");
    land(1);
    posts(size_ + size_ / 2, "a window was not refilled when half of it had come back");
    stays(size_ + size_ / 2, "a window was overfilled");
    raised_layer(size_ + size_ / 2);
    // What is left of the bulk is less than a burst.
    land(flying() - size_ / 2);
    posts(size_ + size_ / 2 + 3 + 5, "the last writes wait for more than half of the window");
    const int64_t single = push(1);
    posts(size_ + size_ / 2 + 3 + 5 + 1, "a write waits though the window is not full");
    release();
    drained({raised_, bulk, single});
  }

  // A transfer that is stopped leaves a full window to another one.
  void stopped() {
    hold();
    const int64_t first = push(2 * size_);
    posts(size_, "a window was not filled");
    s_.sender.fabric->stop(first);
    const int64_t second = push(1);
    land(size_ - size_ / 2);
    posts(size_ + 1, "a write waits behind a transfer that was stopped");
    release();
    drained({first, second});
  }

  // A pair that is lost with a full window leaves nothing to the one that follows it.
  void lost() {
    hold();
    const int64_t first = push(2 * size_);
    posts(size_, "a window was not filled");
    s_.target.fabric->fence(s_.session, std::nullopt);
    s_.target.wait(EventKind::kFenced, s_.session);
    s_.sender.wait(EventKind::kFailed, first);
    release();
    fence_both(s_.target, s_.sender, s_.session);
    s_.sender.wait(EventKind::kSettled, first);
    s_.fake.settle();
    s_.open(0);
    base_ = s_.sender.statistic("posted_writes");
    drained({push(1)});
  }

 private:
  void hold() {
    base_ = s_.sender.statistic("posted_writes");
    s_.fake.set("hold", 1);
  }
  void release() { s_.fake.set("hold", 0); }

  // One write a page, to the page of its number.
  int64_t push(uint64_t pages, int counter = -1) {
    const int64_t number = s_.fresh_slot();
    s_.target.fabric->arm(static_cast<int>(number), 0, s_.session, static_cast<int64_t>(pages));
    s_.sender.fabric->open_transfer(number, s_.session, number << 20);
    SubmitArguments a = program_of(s_.sender, s_.target, number);
    a.whole_page = false;
    a.counter = counter;
    a.base = s_.raised;
    s_.sender.fabric->submit(a, {{0, 0, pages}});
    s_.sender.fabric->finish(number);
    return number;
  }

  // A layer that is raised while the window is full of bulk goes out at once.
  void raised_layer(uint64_t before) {
    raised_ = push(3, s_.counter);
    turn();
    s_.raise_to = s_.raised + 1;
    until(
        [this] {
          s_.raise_some();
          return s_.raised == s_.raise_to;
        },
        "not raised");
    posts(before + 3, "a raised layer waits for the bulk");
  }

  uint64_t posted() const { return s_.sender.statistic("posted_writes") - base_; }
  uint64_t flying() const { return s_.sender.statistic("writes"); }

  void turn() {
    const uint64_t turns = s_.sender.statistic("turns");
    until([&] { return s_.sender.statistic("turns") > turns + 3; }, "the thread stands still");
  }
  void posts(uint64_t count, const char* otherwise) {
    until([&] { return posted() == count; }, otherwise);
  }
  void stays(uint64_t count, const char* otherwise) {
    turn();
    check(posted() == count, otherwise);
  }
  // Lets so many of the writes on the wire land, and waits until the sender knows. What that lets
  // it post does not count.
  void land(uint64_t count) {
    const uint64_t back = posted() - flying() + count;
    s_.fake.set("land_next", static_cast<int64_t>(count));
    until([&] { return posted() - flying() >= back; }, "writes do not come back");
  }

  void drained(const std::vector<int64_t>& transfers) {
    for (const int64_t one : transfers) {
      s_.sender.wait(EventKind::kDrained, one);
      s_.sender.fabric->close_transfer(one);
      s_.target.fabric->disarm(static_cast<int>(one));
    }
    s_.fake.settle();
    check(std::memcmp(s_.sender.memory, s_.target.memory, s_.target.shape.page_bytes) == 0,
          "a page is not there");
    check(s_.fake.violations().empty(), "violations: " + s_.fake.violations());
  }

  Scenario s_;
  const uint64_t size_;  // writes
  uint64_t base_ = 0;
  int64_t raised_ = -1;
};

}  // namespace

void window(const Fake& fake, const std::string& library, const std::string& provider) {
  fake.set("segments", 1);
  fake.set("again_permille", 0);
  Window one(fake, library, provider);
  one.bursts();
  one.stopped();
  one.lost();
}

}  // namespace pdnode::test
