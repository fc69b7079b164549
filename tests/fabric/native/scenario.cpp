#include "scenario.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <numeric>

namespace pdnode::test {

Scenario::Scenario(const Fake& fake_, const std::string& library, const std::string& provider_,
                   const Shape& shape, uint64_t seed, double silence_s)
    : fake(fake_),
      provider(*find_provider(provider_)),
      chance(seed),
      sender(library, provider_, shape, silence_s),
      target(library, provider_, shape),
      model(shape.bytes()),
      counter_fd_(memfd_create("counter", MFD_CLOEXEC)) {
  for (uint64_t i = 0; i < shape.bytes(); ++i) sender.memory[i] = static_cast<uint8_t>(chance());
  check(ftruncate(counter_fd_.get(), kCounterPageBytes) == 0, "ftruncate");
  counter = sender.fabric->add_counter(counter_fd_.get());
  const Error error =
      LayerCounter::open(counter_fd_.get(), {sender.fabric->wake_fd(0)}, &worker_);
  check(!error, error.text());
}

int Scenario::fresh_slot() {
  int slot = 0;
  do {
    slot = 1 + below(kSlots - 1);
  } while (!slots_.insert(slot).second);
  return slot;
}

std::vector<uint64_t> Scenario::all_pages() {
  std::vector<uint64_t> pages(target.shape.pages);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), chance);
  return pages;
}

void Scenario::open(uint64_t cut) { join(sender, target, ++session, cut); }

void Scenario::raise_some() {
  for (int i = below(3); i > 0 && raised < raise_to; --i) {
    worker_->raise();
    ++raised;
  }
}

}  // namespace pdnode::test
