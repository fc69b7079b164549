// One seed: two nodes, a session, and the model of what the target's memory must hold.
#pragma once

#include <set>

#include "node.hpp"

namespace pdnode::test {

struct Scenario {
  Scenario(const Fake& fake_, const std::string& library, const std::string& provider,
           const Shape& shape, uint64_t seed, double silence_s = 60);

  int below(int limit) { return static_cast<int>(chance() % static_cast<uint64_t>(limit)); }
  int fresh_slot();
  std::vector<uint64_t> all_pages();  // shuffled
  void open(uint64_t cut);            // the next session
  void raise_some();                  // some of the layers that programs wait for

  const Fake& fake;
  const Provider& provider;
  std::mt19937_64 chance;
  Node sender, target;
  int counter = -1;
  uint64_t raised = 0, raise_to = 0;
  int64_t session = 0, next_transfer = 1;
  std::vector<uint8_t> model;

 private:
  std::set<int> slots_;
  Fd counter_fd_;
  std::unique_ptr<LayerCounter> worker_;
};

void exchange(Scenario& s);
// One fault of the provider or of the peer; then the same nodes work again.
void fault(Scenario& s, int which);
extern const int kFaults;
void wide_regions(const Fake& fake, const std::string& library);
// Bursts, and what must not wait for one.
void window(const Fake& fake, const std::string& library, const std::string& provider);
void device_memory(const Fake& fake, const std::string& library, const std::string& provider);
void patience(Scenario& s);  // a device that says "try again" for ever; takes seconds
constexpr double kSilenceS = 5;
void silent_device(Scenario& s);  // a completion never comes; takes kSilenceS
void dead_queue(Scenario& s);     // the completion queue fails for good; the sender is of no use then
void closed_listener(Scenario& s);  // and opened again
void early_probe(Scenario& s);     // asked for before the peer knows our address
void many_sessions(Scenario& s);  // what fenced ones leave behind

}  // namespace pdnode::test
