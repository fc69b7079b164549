// What goes wrong: errors, silence, repetitions, fences. Nothing hangs, nothing is said that is not
// so, and after the target's fence no byte lands.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "scenario.hpp"

namespace pdnode::test {

namespace {

// A transfer of all pages, each to the place of its own number; slot and transfer have one number.
int64_t push_all(Scenario& s, int generation, bool finish = true) {
  const int64_t number = s.fresh_slot();
  const Shape& shape = s.target.shape;
  s.target.fabric->arm(static_cast<int>(number), generation, s.session,
                       static_cast<int64_t>(shape.pages * shape.layers));
  s.sender.fabric->open_transfer(number, s.session, number << 20 | generation << 12);
  std::vector<Span> spans;
  for (const uint64_t page : s.all_pages()) spans.push_back({page, page, 1});
  s.sender.fabric->submit(program_of(s.sender, s.target, number), spans);
  if (finish) s.sender.fabric->finish(number);
  return number;
}

void end(Scenario& s, int64_t number) {
  s.sender.fabric->close_transfer(number);
  s.target.fabric->disarm(static_cast<int>(number));
  s.target.take(EventKind::kReached, number);
}

// Lays a pattern over the target's memory and looks whether anything changes it.
void nothing_lands(Scenario& s) {
  const uint64_t units = s.target.statistic("received_units");
  std::memset(s.target.memory, 0xa5, s.target.shape.bytes());
  s.fake.settle();
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (uint64_t i = 0; i < s.target.shape.bytes(); ++i) {
    check(s.target.memory[i] == 0xa5, "a byte landed after the fence");
  }
  check(s.target.statistic("received_units") == units, "an immediate counted after the fence");
}

// The same pages again over a new session: all there, once.
void works_again(Scenario& s) {
  while (s.sender.take(EventKind::kLost, s.session) || s.target.take(EventKind::kLost, s.session)) {
  }
  s.open(0);
  const int64_t number = push_all(s, 77);
  s.target.wait(EventKind::kReached, number);
  s.sender.wait(EventKind::kDrained, number);
  check(std::memcmp(s.sender.memory, s.target.memory, s.target.shape.bytes()) == 0,
        "pages are missing after a new session");
  end(s, number);
}

void fence_target_then_sender(Scenario& s) {
  s.target.fabric->fence(s.session, std::nullopt);
  s.target.wait(EventKind::kFenced, s.session);
  nothing_lands(s);
  s.sender.fabric->fence(s.session, std::nullopt);
  s.sender.wait(EventKind::kFenced, s.session);
}

void write_error(Scenario& s) {
  s.fake.set("fail_lands", s.below(2));
  s.fake.set("fail_next", 1);
  const int64_t number = push_all(s, 5);
  const Event failed = s.sender.wait(EventKind::kFailed, number);
  // The connection may be known as lost before the write's error is read: then no pair is named yet.
  const bool wrote = failed.pairs == std::vector<Pair>{{0, 0}} && failed.text.find("write: ") == 0;
  const bool lost = failed.text.find("no connection to rank") == 0;
  check(wrote || lost, "failed does not say what: " + failed.text);
  const Event settled = s.sender.wait(EventKind::kSettled, number);
  check(settled.pairs == std::vector<Pair>{{0, 0}}, "settled does not name the pair");
  check(s.sender.statistic("writes") == 0, "settled with writes in flight");
  check(!s.sender.has(EventKind::kDrained, number), "drained after an error");
  check(s.sender.fabric->nics().front()->flow.failed.writes.get() > 0, "the NIC is not marked");
  fence_target_then_sender(s);
  end(s, number);
}

// `loses`: it lands and its completion never comes; else the write is swallowed whole.
void silence(Scenario& s, bool loses) {
  s.fake.set(loses ? "lose_next" : "swallow_next", 1);
  const int64_t number = push_all(s, 6);
  if (loses) s.target.wait(EventKind::kReached, number);
  until([&] { return s.sender.statistic("writes") == 1; }, "not all other writes came back");
  check(!s.sender.has(EventKind::kDrained, number), "drained with a write outstanding");
  check(loses || !s.target.has(EventKind::kReached, number), "reached without all pages");
  if (s.below(2) == 0) {
    fence_target_then_sender(s);
  } else {
    s.sender.fabric->fence(s.session, std::nullopt);
    s.sender.wait(EventKind::kFenced, s.session);
    s.target.fabric->fence(s.session, std::nullopt);
    s.target.wait(EventKind::kFenced, s.session);
    nothing_lands(s);
  }
  s.sender.wait(EventKind::kFailed, number);
  s.sender.wait(EventKind::kSettled, number);
  end(s, number);
}

void repeated_immediate(Scenario& s) {
  const uint64_t before = s.target.statistic("overshoots");
  s.fake.set("repeat_next", 1);
  const int64_t number = push_all(s, 7);
  const Event over = s.target.wait(EventKind::kOvershoot, number);
  check(over.count > static_cast<int64_t>(s.target.shape.pages * s.target.shape.layers),
        "an overshoot that is none");
  s.sender.wait(EventKind::kDrained, number);
  check(s.target.statistic("overshoots") == before + 1, "the overshoot is not counted once");
  end(s, number);
  fence_both(s.sender, s.target, s.session);
}

// The fence comes while every write is on the wire.
void fence_in_flight(Scenario& s, bool target_first) {
  s.fake.set("hold", 1);
  const int64_t number = push_all(s, 8, s.below(2) == 0);
  until([&] { return s.sender.statistic("writes") > 0; }, "nothing posted");
  Node& first = target_first ? s.target : s.sender;
  first.fabric->fence(s.session, std::nullopt);
  first.wait(EventKind::kFenced, s.session);
  if (!target_first) {
    s.fake.set("hold", s.below(2));
    s.target.fabric->fence(s.session, std::nullopt);
    s.target.wait(EventKind::kFenced, s.session);
  }
  s.fake.set("hold", 0);
  nothing_lands(s);
  s.sender.wait(EventKind::kFailed, number);
  if (target_first) {
    s.sender.fabric->fence(s.session, std::nullopt);
    s.sender.wait(EventKind::kFenced, s.session);
  }
  s.sender.wait(EventKind::kSettled, number);
  end(s, number);
}

void stop_in_flight(Scenario& s) {
  s.fake.set("hold", 1);
  const int64_t number = push_all(s, 9, false);
  until([&] { return s.sender.statistic("writes") > 0; }, "nothing posted");
  s.sender.fabric->stop(number);
  check(!s.sender.has(EventKind::kDrained, number), "drained with writes on the wire");
  s.fake.set("hold", 0);
  s.sender.wait(EventKind::kDrained, number);
  // The write that rings the doorbell of a batch that was stopped is no page, and may still come.
  const int64_t landed = s.fake.count("landed_pages");
  s.fake.settle();
  check(s.fake.count("landed_pages") == landed, "a page landed after drained");
  end(s, number);
  fence_both(s.target, s.sender, s.session);
}

// The set-up stops anywhere: what was registered and opened is gone after the fence.
void fence_in_set_up(Scenario& s) {
  fence_both(s.target, s.sender, s.session);
  const int64_t regions = s.fake.count("mr"), endpoints = s.fake.count("ep");
  const int64_t session = ++s.session;
  const std::string token = "0123456789abcdef";
  const int steps = s.below(5);
  s.sender.fabric->open_session(session, {0}, {}, token);
  s.target.fabric->open_session(session, {0}, {s.target.region}, token);
  if (steps > 0) {
    s.sender.wait(EventKind::kOpened, session);
    s.target.wait(EventKind::kOpened, session);
    s.target.fabric->connect(session, {0, 0}, s.sender.address(session), 10);
    if (s.sender.rdm) s.sender.fabric->connect(session, {0, 0}, s.target.address(session), 10);
  }
  if (steps > 1) {
    s.target.wait(EventKind::kConnected, session);
    s.sender.fabric->set_remote(session, s.target.described(session));
    s.target.fabric->set_remote(session, s.sender.described(session));
  }
  if (steps > 2) s.target.fabric->probe(session);
  if (steps > 3) s.sender.fabric->probe(session);
  if (s.below(2) == 0) std::this_thread::sleep_for(std::chrono::microseconds(s.below(300)));
  if (s.below(2) == 0) {
    fence_both(s.target, s.sender, session);
  } else {
    fence_both(s.sender, s.target, session);
  }
  until([&] { return s.fake.count("mr") == regions; }, "registrations are left");
  // An RDM endpoint that may still be connecting is kept for 5 s.
  if (!s.sender.rdm) {
    until([&] { return s.fake.count("ep") == endpoints; }, "endpoints are left");
  }
  until([&] { return s.fake.count("request") == 0; },
        "a connection request was neither accepted nor rejected");
  for (Node* node : {&s.sender, &s.target}) {
    for (const EventKind kind : {EventKind::kOpened, EventKind::kConnected, EventKind::kProbed}) {
      node->take(kind, session);
    }
  }
}

// The peer names an endpoint that cannot be one, then the right one.
void wrong_name(Scenario& s, int64_t session) {
  s.target.fabric->connect(session, {0, 0}, "short", 10);
  const Event lost = s.target.wait(EventKind::kLost, session);
  check(lost.text.find("a name of 5 bytes") != std::string::npos, "lost says: " + lost.text);
  s.target.fabric->connect(session, {0, 0}, s.sender.address(session), 10);
  s.target.wait(EventKind::kConnected, session);
}

void no_connection(Scenario& s) {
  fence_both(s.target, s.sender, s.session);
  const int64_t session = ++s.session;
  const uint64_t rejected = s.sender.statistic("rejected_connections");
  s.sender.fabric->open_session(session, {0}, {}, "0123456789abcdef");
  enum { kForeign, kUnfinished, kNoEndpoint, kKinds };
  const int kind = s.sender.rdm ? kForeign : s.below(kKinds);
  if (kind == kUnfinished) s.fake.set("never_connects", 1);
  if (kind == kNoEndpoint) s.fake.set("no_accept_next", 1);
  s.target.fabric->open_session(session, {0}, {},
                                kind == kForeign ? "fedcba9876543210" : "0123456789abcdef");
  s.target.wait(EventKind::kOpened, session);
  s.sender.wait(EventKind::kOpened, session);
  if (s.sender.rdm) {
    wrong_name(s, session);
  } else {
    s.target.fabric->connect(session, {0, 0}, s.sender.address(session),
                             kind == kUnfinished ? 0.02 : 10);
    const Event lost = s.target.wait(EventKind::kLost, session);
    const bool in_time = lost.text.find("within") == std::string::npos;
    check(in_time == (kind != kUnfinished), "lost says: " + lost.text);
    check(s.sender.statistic("rejected_connections") == rejected + (kind != kUnfinished ? 1 : 0),
          "a request was not rejected");
    check(s.fake.count("request") == 0, "a request was neither accepted nor rejected");
  }
  fence_both(s.target, s.sender, session);
}

// Nobody knows whether the endpoint or the registration is closed, so nobody says so.
void failed_fence(Scenario& s) {
  s.fake.set("close_fails_next", 1);
  s.target.fabric->fence(s.session, std::nullopt);
  const Event lost = s.target.wait(EventKind::kLost, s.session);
  check(lost.text.find("the fence failed: fi_close") == 0, "lost says: " + lost.text);
  s.sender.fabric->fence(s.session, std::nullopt);
  s.sender.wait(EventKind::kFenced, s.session);
  check(!s.target.has(EventKind::kFenced, s.session), "fenced after a fence that failed");
}

// A device that never takes a receive.
void no_receives(Scenario& s) {
  fence_both(s.target, s.sender, s.session);
  if (!s.target.fabric->posting().posts_receives) return;
  s.fake.set("refuse_receives", 1);
  const int64_t session = ++s.session;
  s.sender.fabric->open_session(session, {0}, {}, "0123456789abcdef");
  s.target.fabric->open_session(session, {0}, {}, "0123456789abcdef");
  s.sender.wait(EventKind::kOpened, session);
  s.target.wait(EventKind::kOpened, session);
  s.target.fabric->connect(session, {0, 0}, s.sender.address(session), 10);
  const Event lost = s.target.wait(EventKind::kLost, session);
  check(lost.text == "fi_recv: try again, for 3 s", "lost says: " + lost.text);
  s.fake.set("refuse_receives", 0);
  fence_both(s.target, s.sender, session);
}

// The device takes nothing any more and says "try again" for ever.
void endless_again(Scenario& s) {
  s.fake.set("again_always", 1);
  const int64_t number = push_all(s, 10);
  const Event failed = s.sender.wait(EventKind::kFailed, number);
  check(failed.text.find("try again") != std::string::npos, "failed says: " + failed.text);
  s.sender.wait(EventKind::kSettled, number);
  s.fake.set("again_always", 0);
  fence_target_then_sender(s);
  end(s, number);
}

int64_t push_refused(Scenario& s, int generation, bool finish) {
  s.fake.set("again_always", 1);
  const int64_t refused = s.fake.count("again");
  const int64_t number = push_all(s, generation, finish);
  until([&] { return s.fake.count("again") > refused; }, "no write was refused");
  return number;
}

// A transfer is stopped when it was refused; much later another one is refused for a moment.
void old_refusal(Scenario& s) {
  const int64_t first = push_refused(s, 14, false);
  s.sender.fabric->stop(first);
  s.sender.wait(EventKind::kDrained, first);
  end(s, first);
  std::this_thread::sleep_for(std::chrono::nanoseconds(kRefusedNs));
  const int64_t second = push_refused(s, 15, true);
  s.fake.set("again_always", 0);
  s.target.wait(EventKind::kReached, second);
  s.sender.wait(EventKind::kDrained, second);
  end(s, second);
}

void full_nic(Scenario& s) {
  fence_both(s.target, s.sender, s.session);
  if (!s.provider.session_registration) return;
  const int64_t regions = s.fake.count("mr");
  s.fake.set("nic_bytes", 8192);
  const int64_t session = ++s.session;
  s.target.fabric->open_session(session, {0}, {s.target.region, s.target.region}, "0123456789abcdef");
  Event event;
  until(
      [&] {
        return s.target.take(EventKind::kLost, session, &event) ||
               s.target.take(EventKind::kOpened, session, &event);
      },
      "neither lost nor opened");
  // Where the source is registered as well, the region counts once more.
  const uint64_t copies = s.target.fabric->posting().local_registration ? 3 : 2;
  const bool fits = copies * s.target.shape.bytes() + kScratchBytes <= 8192;
  check(fits == (event.kind == EventKind::kOpened), "the NIC's limit is ignored");
  s.fake.set("nic_bytes", int64_t{1} << 42);
  s.target.fabric->fence(session, std::nullopt);
  s.target.wait(EventKind::kFenced, session);
  check(s.fake.count("mr") == regions, "registrations are left after a failed one");
}

// A batch breaks off after a write that promised more, and its transfer is stopped.
void stopped_batch(Scenario& s) {
  s.fake.set("again_permille", 0);
  s.fake.set("refuse_after_more", 1);
  const int64_t number = push_all(s, 11, false);
  const bool rings = s.provider.doorbell;
  if (rings) {
    const int64_t before = s.fake.count("again");
    until([&] { return s.fake.count("again") > before; }, "no write was refused");
  }
  s.sender.fabric->stop(number);
  // The stop is there before the device takes anything again.
  const uint64_t turns = s.sender.statistic("turns");
  until([&] { return s.sender.statistic("turns") > turns + 2; }, "the thread is stuck");
  s.fake.set("refuse_after_more", 0);
  s.sender.wait(EventKind::kDrained, number);
  check(s.sender.statistic("writes") <= 1, "drained with writes in flight");
  end(s, number);
  fence_both(s.target, s.sender, s.session);
}

}  // namespace

const int kFaults = 12;

void fault(Scenario& s, int which) {
  s.fake.settle();
  switch (which) {
    case 0: write_error(s); break;
    case 1: silence(s, true); break;
    case 2: silence(s, false); break;
    case 3: repeated_immediate(s); break;
    case 4: fence_in_flight(s, true); break;
    case 5: fence_in_flight(s, false); break;
    case 6: stop_in_flight(s); break;
    case 7: fence_in_set_up(s); break;
    case 8: no_connection(s); break;
    case 9: stopped_batch(s); break;
    case 10: failed_fence(s); break;
    default: full_nic(s); break;
  }
  works_again(s);
}

void patience(Scenario& s) {
  s.fake.settle();
  old_refusal(s);
  endless_again(s);
  works_again(s);
  no_receives(s);
  works_again(s);
}

void early_probe(Scenario& s) {
  if (!s.sender.rdm) return;
  s.fake.settle();
  fence_both(s.target, s.sender, s.session);
  const int64_t session = ++s.session, unreachable = s.fake.count("unreachable");
  const std::string token = "0123456789abcdef";
  s.sender.fabric->open_session(session, {0}, {}, token);
  s.target.fabric->open_session(session, {0}, {s.target.region}, token);
  s.sender.wait(EventKind::kOpened, session);
  s.target.wait(EventKind::kOpened, session);
  s.sender.fabric->connect(session, {0, 0}, s.target.address(session), 60);
  s.sender.wait(EventKind::kConnected, session);
  s.sender.fabric->set_remote(session, s.target.described(session));
  s.target.fabric->set_remote(session, s.sender.described(session));
  const uint64_t turns = s.sender.statistic("turns");
  s.sender.fabric->probe(session, true);
  until([&] { return s.sender.statistic("turns") > turns + 2; }, "the thread stands still");
  s.fake.settle();
  check(s.fake.count("unreachable") == unreachable, "probed before the peer knew the address");
  check(!s.sender.has(EventKind::kLost, session), "lost before the peer has connected");
  s.target.fabric->connect(session, {0, 0}, s.sender.address(session), 60);
  s.target.wait(EventKind::kConnected, session);
  s.target.fabric->probe(session);
  s.sender.wait(EventKind::kProbed, session);
  s.target.wait(EventKind::kProbed, session);
  fence_both(s.target, s.sender, session);
  works_again(s);
}

void closed_listener(Scenario& s) {
  if (s.sender.rdm) return;
  s.fake.settle();
  // What came through it goes on.
  const int64_t number = push_all(s, 16);
  s.sender.fabric->unlisten(0);
  s.target.wait(EventKind::kReached, number);
  s.sender.wait(EventKind::kDrained, number);
  end(s, number);
  check(s.fake.count("pep") == 1, "a listener is left");
  fence_both(s.target, s.sender, s.session);
  const int64_t session = ++s.session;
  s.target.fabric->open_session(session, {0}, {}, "0123456789abcdef");
  s.target.wait(EventKind::kOpened, session);
  s.target.fabric->connect(session, {0, 0}, s.sender.address(session), 10);
  const Event lost = s.target.wait(EventKind::kLost, session);
  check(lost.text.find("within") == std::string::npos, "lost says: " + lost.text);
  fence_both(s.target, s.sender, session);
  s.sender.listen();
  const uint64_t turns = s.sender.fabric->turns().front();
  works_again(s);
  check(s.sender.fabric->turns().front() > turns, "the thread does not turn");
}

void silent_device(Scenario& s) {
  s.fake.settle();
  s.fake.set("lose_next", 1);
  const int64_t number = push_all(s, 12);
  const Event failed = s.sender.wait(EventKind::kFailed, number);
  check(failed.text.find("no completion within") != std::string::npos,
        "failed says: " + failed.text);
  check(failed.pairs == std::vector<Pair>{{0, 0}}, "failed does not name the pair");
  s.sender.wait(EventKind::kLost, s.session);
  check(!s.sender.has(EventKind::kSettled, number), "settled with a write outstanding");
  fence_target_then_sender(s);
  s.sender.wait(EventKind::kSettled, number);
  end(s, number);
  works_again(s);
}

void dead_queue(Scenario& s) {
  s.fake.settle();
  s.fake.set("hold", 1);
  const int64_t number = push_all(s, 13);
  until([&] { return s.sender.statistic("writes") > 0; }, "nothing posted");
  s.fake.set("break_queue", 1);  // at the next look at it: the writes stay on the wire until then
  const Event failed = s.sender.wait(EventKind::kFailed, number);
  s.fake.set("hold", 0);
  check(failed.text.find("fi_cq_read") == 0, "failed says: " + failed.text);
  check(failed.pairs == std::vector<Pair>{{0, 0}}, "failed does not name the pair");
  const Event lost = s.sender.wait(EventKind::kLost, s.session);
  check(lost.text.find("fi_cq_read") == 0, "lost says: " + lost.text);
  fence_target_then_sender(s);
  s.sender.wait(EventKind::kSettled, number);
  check(s.sender.statistic("writes") == 0, "writes are in flight on a NIC that is out");
  end(s, number);
  const int64_t session = ++s.session;
  s.sender.fabric->open_session(session, {0}, {}, "0123456789abcdef");
  s.sender.wait(EventKind::kOpened, session);
  s.sender.fabric->connect(session, {0, 0}, s.sender.address(session), 10);
  const Event refused = s.sender.wait(EventKind::kLost, session);
  check(refused.text.find("fi_cq_read") == 0, "a NIC that is out connects: " + refused.text);
  s.sender.fabric->fence(session, std::nullopt);
  s.sender.wait(EventKind::kFenced, session);
}

void many_sessions(Scenario& s) {
  s.fake.settle();
  constexpr int kWarm = 10, kMore = 40;
  uint64_t before = 0;
  for (int i = 0; i < kWarm + kMore; ++i) {
    if (i == kWarm) before = s.sender.statistic("contexts");
    fence_both(s.target, s.sender, s.session);
    s.open(0);
  }
  const uint64_t after = s.sender.statistic("contexts");
  const uint64_t room = 8 * 2 * s.provider.window_writes;  // of sessions whose queue is not read yet
  check(after <= before + room, std::to_string(after - before) + " contexts are kept by " +
                                    std::to_string(kMore) + " fenced sessions");
}

}  // namespace pdnode::test
