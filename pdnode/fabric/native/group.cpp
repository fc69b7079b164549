// The thread of a group: its loop, its commands, and how it sleeps.

#include "group.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <utility>

namespace pdnode {

namespace {

constexpr int64_t kSpinNs = 200'000;         // after the last activity
constexpr int64_t kEventsEveryNs = 100'000;  // an EQ read costs twice a CQ read
constexpr unsigned kEventsEveryTurns = 32;
constexpr int kIdleTimeoutMs = 500;
constexpr int kBlockedTimeoutMs = 1;
constexpr unsigned kMostEmptyWakeups = 64;  // in a row
constexpr long kNapNs = 50'000;  // where the provider has nothing to wait on

class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// Endpoints whose closing now could crash stay open until the process ends, with their memory.
void keep_open(std::vector<std::unique_ptr<RdmEndpoint>> endpoints, OpPool ops) {
  static std::mutex mutex;
  static auto& kept = *new std::vector<std::unique_ptr<RdmEndpoint>>;
  static auto& kept_ops = *new std::vector<OpPool>;
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto& endpoint : endpoints) kept.push_back(std::move(endpoint));
  kept_ops.push_back(std::move(ops));
}

}  // namespace

Group::~Group() {
  request_stop();
  join();
  static_cast<void>(close());  // nobody is left to hear of it
}

Error Group::start(const std::vector<std::pair<std::string, std::string>>& named, int first,
                   int cpu) {
  for (const auto& [name, address] : named) {
    const int index = first + static_cast<int>(nics.size());
    nics.push_back(std::make_unique<Nic>(hub_.library, hub_.provider, index, name, address,
                                         hub_.window, hub_.device_memory));
    Nic& nic = *nics.back();
    Error error = nic.open();
    if (!error) error = nic.self_test();
    if (error) return Error("NIC " + name + " (" + address + "): " + error.text());
  }
  {
    const SignalsBlocked blocked;  // signals are Python's: the threads start with them blocked
    if (hub_.provider.pins) registrar_.start();
    thread_ = std::thread([this] { run(); });
  }
  pthread_setname_np(thread_.native_handle(), ("fabric-" + std::to_string(number)).c_str());
  if (cpu < 0) return Error();
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  if (cpu < CPU_SETSIZE) CPU_SET(static_cast<unsigned>(cpu), &cpus);
  const int code = pthread_setaffinity_np(thread_.native_handle(), sizeof cpus, &cpus);
  return code == 0 ? Error() : Error(errno_text(("cpu " + std::to_string(cpu)).c_str(), code));
}

void Group::post(Command command) {
  {
    const std::lock_guard<std::mutex> lock(commands_mutex_);
    commands_.push_back(std::move(command));
    has_commands_.store(true, std::memory_order_release);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_relaxed)) signal_eventfd(wake_.get());
}

void Group::request_stop() {
  stopping_.store(true);
  if (wake_.get() >= 0) signal_eventfd(wake_.get());
}

void Group::join() {
  if (thread_.joinable()) thread_.join();
  registrar_.stop();
}

Error Group::close() {
  not_closed_ = Error();
  commands_.clear();  // they may hold registrations
  std::vector<Prepared> memory;
  for (auto& [id, part] : parts_) {
    std::vector<Connection*> all;
    for (const auto& connection : part->connections) all.push_back(connection.get());
    close_connections(part.get(), all);
    for (auto& [nic, on] : part->nics) {
      retire_rdm(&on, false);
      memory.push_back(std::move(on.memory));
    }
  }
  const Error registered = close_memory(&memory);
  if (!not_closed_) not_closed_ = registered;
  parts_.clear();
  endpoints_.clear();
  release_condemned(now_ns());
  const bool keeps = !condemned_.empty();
  if (keeps) keep_open(std::move(condemned_), std::move(ops_));
  condemned_.clear();
  retired_.clear();
  for (auto& [region, by_nic] : base_registrations_) {
    for (auto& [nic, pieces] : by_nic) {
      for (Registration& piece : pieces) close(&piece.mr, *find_nic(nic));
    }
  }
  base_registrations_.clear();
  watches_.clear();
  // Queues, domains and listeners go; the Nic objects stay, for their statistics.
  for (auto& nic : nics) {
    for (auto& listener : nic->listeners) close(&listener, *nic);
    nic->listeners.clear();
    if (keeps) {  // used by what is kept open
      nic->queues.cq.release();
      nic->domain.release();
      nic->fabric.release();
    }
    close(&nic->queues.eq, *nic);
    close(&nic->queues.cq, *nic);
    nic->queues = Queues();
    close(&nic->domain, *nic);
    close(&nic->fabric, *nic);
  }
  wake_.reset();
  return not_closed_;
}

void Group::run() {
  last_active_ns_ = turn_ns_ = now_ns();
  unsigned turn = 0;
  while (!stopping_.load(std::memory_order_relaxed)) {
    turns.add(1);
    bool active = run_commands();
    active |= look_counters();
    active |= pump();
    for (auto& nic : nics) active |= read_completions(nic.get()) > 0;
    flush_failures();
    const int64_t now = now_ns();
    if (++turn % kEventsEveryTurns == 0 || now >= events_due_ns_) {
      for (auto& nic : nics) active |= read_events(nic.get());
      check_deadlines(now);
      flush_failures();
      events_due_ns_ = now + kEventsEveryNs;
    }
    if (active) {
      last_active_ns_ = now;
      empty_wakeups_ = 0;
    } else if (!hub_.busy && now - last_active_ns_ > kSpinNs) {
      sleep(now);
      events_due_ns_ = 0;
      turn_ns_ = now_ns();
      continue;
    }
    turn_ns_ = now;
  }
}

bool Group::run_commands() {
  if (!has_commands_.load(std::memory_order_acquire)) return false;
  std::vector<Command> taken;
  {
    const std::lock_guard<std::mutex> lock(commands_mutex_);
    taken.swap(commands_);
    has_commands_.store(false, std::memory_order_relaxed);
  }
  for (Command& command : taken) command(*this);
  return true;
}

void Group::add_counter(int counter, std::shared_ptr<CounterPage> page) {
  auto watch = std::make_unique<Watch>();
  watch->counter = counter;
  watch->page = std::move(page);
  watches_.push_back(std::move(watch));
}

void Group::remove_counter(int counter) {
  const auto found =
      std::find_if(watches_.begin(), watches_.end(),
                   [counter](const auto& watch) { return watch->counter == counter; });
  if (found == watches_.end()) return;
  const std::vector<Program*> orphans = (*found)->armed;
  watches_.erase(found);
  for (Program* program : orphans) {
    fail(program->transfer, {-1, -1}, "the layer counter is gone");
  }
  flush_failures();
}

bool Group::look_counters() {
  bool moved = false;
  for (auto& watch : watches_) {
    if (watch->armed.empty()) continue;
    const uint64_t value = watch->page->value().load(std::memory_order_acquire);
    if (value == watch->seen) continue;
    watch->seen = value;
    raise(watch.get(), value);
    moved = true;
  }
  return moved;
}

void Group::raise(Watch* watch, uint64_t value) {
  const int64_t now = now_ns();
  for (size_t i = 0; i < watch->armed.size();) {
    Program* program = watch->armed[i];
    // Increments may be seen together: every layer up to the new value is due.
    const uint64_t passed = value > program->base ? value - program->base : 0;
    const auto due = static_cast<uint32_t>(std::min<uint64_t>(passed, program->layers));
    for (uint32_t layer = program->due; layer < due; ++layer) {
      program->records[layer].raised_ns = now;
    }
    program->due = std::max(program->due, due);
    enqueue(program, true);
    if (program->due == program->layers) {
      watch->armed[i] = watch->armed.back();
      watch->armed.pop_back();
    } else {
      ++i;
    }
  }
}

bool Group::counters_moved() const {
  return std::any_of(watches_.begin(), watches_.end(), [](const auto& watch) {
    return !watch->armed.empty() &&
           watch->page->value().load(std::memory_order_acquire) != watch->seen;
  });
}

bool Group::awaits_silent() const {
  return std::any_of(watches_.begin(), watches_.end(), [](const auto& watch) {
    return !watch->armed.empty() && watch->page->silent();
  });
}

void Group::set_sleeping(uint32_t value) {
  sleeping_.store(value != 0, std::memory_order_relaxed);
  for (auto& watch : watches_) {
    if (!watch->armed.empty()) {
      watch->page->sleeping(number).store(value, std::memory_order_relaxed);
    }
  }
}

int Group::sleep_timeout_ms(int64_t now) const {
  if (blocked_ || receives_owed_ || bells_owed_ || probes_waiting_ > 0) return kBlockedTimeoutMs;
  if (next_deadline_ns_ == 0) return kIdleTimeoutMs;
  const int64_t left_ms = (next_deadline_ns_ - now) / 1'000'000 + 1;
  return static_cast<int>(std::clamp<int64_t>(left_ms, 1, kIdleTimeoutMs));
}

void Group::sleep(int64_t now) {
  set_sleeping(1);
  // Pairs with the fences of post() and of LayerCounter::raise().
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!has_commands_.load(std::memory_order_acquire) && !counters_moved() &&
      !stopping_.load(std::memory_order_acquire)) {
    wakeups.add(block(sleep_timeout_ms(now)) ? 1 : 0);
  }
  set_sleeping(0);
}

bool Group::block(int timeout_ms) {
  std::vector<pollfd> waits = {{wake_.get(), POLLIN, 0}};
  // A wait object that is always ready, or a provider that always has something to read but never
  // gives it, must not cost a core.
  bool nap = empty_wakeups_ >= kMostEmptyWakeups || awaits_silent();
  for (auto& nic : nics) {
    if (!nic->dead.empty()) continue;
    if (nic->queues.cq_fd < 0 || (nic->queues.eq && nic->queues.eq_fd < 0)) {
      nap = true;
      continue;
    }
    fid_t watched[2] = {&nic->queues.cq->fid, nullptr};
    waits.push_back({nic->queues.cq_fd, POLLIN, 0});
    if (nic->queues.eq) {
      watched[1] = &nic->queues.eq->fid;
      waits.push_back({nic->queues.eq_fd, POLLIN, 0});
    }
    if (fi_trywait(nic->fabric.get(), watched, nic->queues.eq ? 2 : 1) != 0) {
      if (!nap) {
        ++empty_wakeups_;
        return false;
      }
    }
  }
  timespec timeout = {timeout_ms / 1000, (timeout_ms % 1000) * 1'000'000L};
  if (nap) timeout = {0, parts_.empty() ? 20 * kNapNs : kNapNs};
  const int ready = ppoll(waits.data(), nap ? 1 : waits.size(), &timeout, nullptr);
  // Bytes of a long write are no completion, but they do come: without spinning on, each piece of it
  // would cost another sleep.
  if (ready > 0) last_active_ns_ = now_ns();
  if ((waits[0].revents & POLLIN) != 0) {
    drain_eventfd(wake_.get());
  } else if (!nap && ready > 0) {
    ++empty_wakeups_;
  }
  return true;
}

}  // namespace pdnode
