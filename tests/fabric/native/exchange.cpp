// Transfers as they are meant to go: every byte where it belongs, every count exact, whatever the
// provider does within its rights.

#include <algorithm>
#include <cstring>

#include "scenario.hpp"

namespace pdnode::test {

namespace {

// One transfer of the scenario: which target page gets which source page.
struct Plan {
  int64_t transfer = 0;
  int slot = 0, generation = 0;
  bool halves = false;  // two routes, each half of a page
  std::vector<std::vector<Span>> programs;
  std::vector<std::pair<uint64_t, uint64_t>> pages;  // (source, destination)
  uint64_t units = 0;
  bool reached = false, drained = false;
};

// Cuts neighbours on both sides into spans, so that the core has runs to merge.
std::vector<Span> spans_of(const std::vector<std::pair<uint64_t, uint64_t>>& pages) {
  std::vector<Span> spans;
  for (const auto& [source, destination] : pages) {
    if (!spans.empty() && spans.back().source + spans.back().count == source &&
        spans.back().destination + spans.back().count == destination) {
      ++spans.back().count;
    } else {
      spans.push_back({source, destination, 1});
    }
  }
  return spans;
}

Plan make_plan(Scenario& s, std::vector<uint64_t>* free) {
  Plan plan;
  plan.transfer = s.next_transfer++;
  plan.slot = s.fresh_slot();
  plan.generation = s.below(256);
  plan.halves = s.target.shape.page_bytes % 2 == 0 && s.below(3) == 0;
  const uint64_t count = 1 + s.below(static_cast<int>(free->size()));
  const bool runs = s.below(2) == 0;
  std::vector<uint64_t> taken(free->end() - static_cast<std::ptrdiff_t>(count), free->end());
  free->resize(free->size() - count);
  if (runs) std::sort(taken.begin(), taken.end());
  const uint64_t first = s.chance() % (s.sender.shape.pages - count + 1);
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t source = runs ? first + i : s.chance() % s.sender.shape.pages;
    plan.pages.push_back({source, taken[i]});
  }
  const size_t cut = 1 + s.chance() % count;
  plan.programs.push_back(spans_of({plan.pages.begin(), plan.pages.begin() + cut}));
  if (cut < count) plan.programs.push_back(spans_of({plan.pages.begin() + cut, plan.pages.end()}));
  plan.units = count * s.target.shape.layers * (plan.halves ? 2 : 1);
  return plan;
}

void submit(Scenario& s, const Plan& plan) {
  s.sender.fabric->open_transfer(plan.transfer, s.session,
                                 int64_t{plan.slot} << 20 | plan.generation << 12);
  for (const auto& spans : plan.programs) {
    SubmitArguments a = program_of(s.sender, s.target, plan.transfer);
    if (s.below(2) == 0) {
      a.counter = s.counter;
      a.base = s.raised + static_cast<uint64_t>(s.below(3));
      s.raise_to = std::max(s.raise_to, a.base + static_cast<uint64_t>(a.layers));
    }
    if (plan.halves) {
      a.whole_page = false;
      a.length /= 2;
      s.sender.fabric->submit(a, spans);
      a.source_offset = a.remote_offset = a.length;
    }
    s.sender.fabric->submit(a, spans);
  }
  s.sender.fabric->finish(plan.transfer);
}

void arm(Scenario& s, const Plan& plan) {
  s.target.fabric->arm(plan.slot, plan.generation, s.session,
                       static_cast<int64_t>(plan.units));
}

void check_landed(Scenario& s, const Plan& plan, const char* when) {
  for (uint64_t layer = 0; layer < s.target.shape.layers; ++layer) {
    for (const auto& [source, destination] : plan.pages) {
      check(std::memcmp(s.sender.page(source, layer), s.target.page(destination, layer),
                        s.target.shape.page_bytes) == 0,
            std::string("at ") + when + " page " + std::to_string(destination) + " of layer " +
                std::to_string(layer) + " is not there");
    }
  }
}

// Decode owns a page from then on and writes to it: nothing may put the old bytes back.
void append(Scenario& s, const Plan& plan) {
  for (uint64_t layer = 0; layer < s.target.shape.layers; ++layer) {
    for (const auto& [source, destination] : plan.pages) {
      uint8_t* page = s.target.page(destination, layer);
      page[s.target.shape.page_bytes - 1] ^= 0xff;
      std::memcpy(s.model.data() + (page - s.target.memory), page, s.target.shape.page_bytes);
    }
  }
}

void follow(Scenario& s, std::vector<Plan>* plans) {
  until(
      [&] {
        s.raise_some();
        bool all = true;
        for (Plan& plan : *plans) {
          Event event;
          if (s.target.take(EventKind::kReached, plan.slot, &event)) {
            check(!plan.reached && event.count == static_cast<int64_t>(plan.units) &&
                      event.generation == plan.generation && event.session == s.session,
                  "reached with " + std::to_string(event.count) + " of " +
                      std::to_string(plan.units));
            plan.reached = true;
            check_landed(s, plan, "reached");
          }
          if (s.sender.take(EventKind::kDrained, plan.transfer)) {
            if (!plan.reached) check_landed(s, plan, "drained");
            plan.drained = true;
          }
          all = all && plan.reached && plan.drained;
        }
        for (Node* node : {&s.sender, &s.target}) {
          for (const Event& event : node->gather()) {
            const bool bad = event.kind == EventKind::kFailed || event.kind == EventKind::kLost ||
                             event.kind == EventKind::kOvershoot;
            check(!bad, std::string(kEventNames[static_cast<int>(event.kind)]) + ": " + event.text);
          }
        }
        return all;
      },
      "transfers are not at their end");
}

// A transfer of an earlier use of a slot lands on its later use: it is dropped and counted.
void stale_generation(Scenario& s) {
  std::vector<uint64_t> free = s.all_pages();
  Plan stale = make_plan(s, &free);
  const uint64_t late = s.target.statistic("late_immediates");
  s.target.fabric->arm(stale.slot, (stale.generation + 1) & 0xff, s.session,
                       static_cast<int64_t>(stale.units));
  submit(s, stale);
  until(
      [&] {
        s.raise_some();
        return s.sender.take(EventKind::kDrained, stale.transfer);
      },
      "no drained of a stale transfer");
  s.fake.settle();
  until([&] { return s.target.statistic("late_immediates") > late; }, "no late immediate");
  check(!s.target.take(EventKind::kReached, stale.slot), "an old generation was counted");
  s.sender.fabric->close_transfer(stale.transfer);
  s.target.fabric->disarm(stale.slot);
  append(s, stale);
}

void check_memory(Scenario& s) {
  s.fake.settle();
  check(std::memcmp(s.model.data(), s.target.memory, s.model.size()) == 0,
        "a page changed that nobody may write to");
}

}  // namespace

void exchange(Scenario& s) {
  const uint64_t before = s.target.statistic("received_units");
  uint64_t units = 0;
  for (int round = 1 + s.below(3); round > 0; --round) {
    std::vector<uint64_t> free = s.all_pages();
    std::vector<Plan> plans;
    for (int i = 1 + s.below(3); i > 0 && !free.empty(); --i) {
      plans.push_back(make_plan(s, &free));
      const bool early = s.below(4) == 0;  // immediates may come before arm()
      if (!early) arm(s, plans.back());
      submit(s, plans.back());
      if (early) arm(s, plans.back());
      units += plans.back().units;
    }
    follow(s, &plans);
    for (const Plan& plan : plans) {
      append(s, plan);
      s.target.fabric->disarm(plan.slot);
      uint64_t bytes = 0;
      for (const RecordRow& row : s.sender.fabric->close_transfer(plan.transfer)) {
        check(std::get<4>(row) >= std::get<3>(row) && std::get<3>(row) >= std::get<2>(row),
              "a record goes backwards");
        bytes += std::get<5>(row);
      }
      check(bytes == plan.pages.size() * s.target.shape.layers * s.target.shape.page_bytes,
            "a record has " + std::to_string(bytes) + " bytes");
    }
    check_memory(s);
  }
  check(s.target.statistic("received_units") - before == units, "the units are not exact");
  if (s.below(2) == 0) stale_generation(s);
  check_memory(s);
  check(s.target.statistic("overshoots") == 0, "an overshoot");
  check(s.sender.statistic("writes") == 0, "writes are still in flight");
  check(s.fake.count("most_flying") <= int64_t{s.provider.window_writes} + 2,
        "the window was ignored");
}

}  // namespace pdnode::test
