#include "transfer.hpp"

namespace pdnode {

bool Transfer::add_unit() {
  int64_t now = units.load(std::memory_order_relaxed);
  while (now > 0) {
    if (units.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

bool Transfer::note_failure(Pair pair, const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (pair.first >= 0) failed_pairs_.insert(pair);
  if (failed.load(std::memory_order_relaxed)) return false;
  if (!add_unit()) return false;  // it has ended already
  text_ = why;
  failed.store(true, std::memory_order_release);
  return true;
}

std::string Transfer::failure_text() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return text_;
}

std::vector<Pair> Transfer::failed_pairs() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {failed_pairs_.begin(), failed_pairs_.end()};
}

void Transfer::drop_unit(EventQueue* events) {
  if (units.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (ended.exchange(true)) return;
  Event event;
  event.kind = failed.load() ? EventKind::kSettled : EventKind::kDrained;
  event.session = session;
  event.transfer = id;
  event.pairs = failed_pairs();
  events->push(std::move(event));
}

void Transfer::drop_token(EventQueue* events) {
  if (!token_dropped.exchange(true)) drop_unit(events);
}

}  // namespace pdnode
