// A device group: its NICs and the one thread that touches them.
#pragma once

#include <poll.h>

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "events.hpp"
#include "memory.hpp"
#include "nic.hpp"
#include "registrar.hpp"
#include "session.hpp"
#include "slots.hpp"
#include "stats.hpp"
#include "transfer.hpp"

namespace pdnode {

class Group;

// What all groups share.
struct Hub {
  Hub(const Library& library_, const Provider& provider_, bool busy_, uint32_t window_,
      int64_t silence_ns_, bool device_memory_)
      : library(library_), provider(provider_), busy(busy_), window(window_),
        silence_ns(silence_ns_), device_memory(device_memory_) {}
  const Library& library;
  const Provider& provider;
  const bool busy;
  const uint32_t window;  // 0: the provider's
  const int64_t silence_ns;  // a write that takes longer never comes back
  const bool device_memory;
  EventQueue events;
  SlotTable slots;
  SharedCounters counters;
  std::array<std::atomic<Group*>, kMaxGroups> groups{};
};

using Command = std::function<void(Group&)>;

// A fence over several groups; the last one says `fenced`.
struct FenceTicket {
  FenceTicket(int64_t session_, Pair pair_, int groups_)
      : session(session_), pair(pair_), groups(groups_) {}
  const int64_t session;
  const Pair pair;
  std::atomic<int> groups;
};

class Group {
 public:
  Group(Hub& hub, int number) : number(number), hub_(hub), wake_(make_eventfd()) {}
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group();

  // Python's thread: opens and tests the NICs, then starts the thread.
  Error start(const std::vector<std::pair<std::string, std::string>>& nics, int first, int cpu);
  // Any thread. Never waits for more than a swap of the queue.
  void post(Command command);
  void request_stop();
  void join();
  // After all groups are joined: closes endpoints, registrations, queues and domains, in that
  // order. The first that the provider did not close.
  Error close();
  int wake_fd() const { return wake_.get(); }

  const int number;
  std::vector<std::unique_ptr<Nic>> nics;
  Counter turns, wakeups, contexts;

  // Commands; the group's thread only.
  Error listen(int nic, const std::string& host, int port, int* bound);
  Error unlisten(int nic);
  // `done` is called once the region is registered where that is needed, on this group's thread.
  void add_region(const std::shared_ptr<Region>& region, const std::function<void(Error)>& done);
  void remove_region(int region) { base_registrations_.erase(region); }
  // Registers a region of another group for this session with this group's NICs → `carried`.
  void carry(const std::shared_ptr<SessionShared>& shared, const std::shared_ptr<Region>& region);
  void say_carried(int64_t session, const std::string& why);
  void add_counter(int counter, std::shared_ptr<CounterPage> page);
  void remove_counter(int counter);
  void open_session(const std::shared_ptr<SessionShared>& shared, const std::vector<int>& on,
                    const std::vector<std::shared_ptr<Region>>& writable);
  void connect(int64_t session, Pair pair, const std::vector<uint8_t>& address, int64_t patience);
  void set_remote(int64_t session, std::shared_ptr<const RemoteTable> remote);
  void probe(int64_t session, bool answer);
  void fence(const std::shared_ptr<FenceTicket>& ticket);
  void submit(const std::shared_ptr<Program>& program);
  void halt(const std::shared_ptr<Transfer>& transfer);
  // Ends transfers of a fenced session that have no program to fail with.
  void fail_all(const std::vector<std::shared_ptr<Transfer>>& transfers);

 private:
  struct Watch {
    int counter = -1;
    std::shared_ptr<CounterPage> page;
    uint64_t seen = 0;
    std::vector<Program*> armed;  // with layers still to come
  };
  struct Write;
  // Operations of closed connections, and what had been read of their NIC's queue by then.
  struct Retired {
    Nic* nic = nullptr;
    uint64_t entries_read = 0, empty_runs = 0;
    std::vector<Op*> ops;
  };

  // group.cpp
  void run();
  bool run_commands();
  bool look_counters();
  void raise(Watch* watch, uint64_t value);
  void sleep(int64_t now);
  bool block(int timeout_ms);
  void set_sleeping(uint32_t value);
  bool counters_moved() const;
  bool awaits_silent() const;  // a layer whose raise wakes nobody
  int sleep_timeout_ms(int64_t now) const;

  // group_memory.cpp
  void aside(std::function<Command()> job);
  void need_region(const std::shared_ptr<Region>& region, std::function<void(const Error&)> then);
  Error prepare_nic(const Nic& nic, const std::vector<std::shared_ptr<Region>>& writable,
                    Prepared* prepared) const;  // any thread
  void install_carried(const std::shared_ptr<SessionShared>& shared,
                       const std::shared_ptr<Region>& region,
                       std::map<int, std::vector<Registration>>* found);
  const Registration* local_piece(int region, int nic, uint64_t offset) const;

  // group_session.cpp
  SessionPart* find_part(int64_t session) const;
  Nic* find_nic(int nic) const;
  void install(const std::shared_ptr<SessionShared>& shared, Nic* nic, Prepared* prepared);
  Error install_part(SessionPart* part, Nic* nic, Prepared* prepared);
  Error open_rdm(SessionPart* part, NicPart* on);
  Error connect_msg(Connection* connection, const std::vector<uint8_t>& address);
  Error connect_rdm(Connection* connection, const std::vector<uint8_t>& address);
  Error prepare(Connection* connection, fi_info* info);
  void lose_all(const fid_ep* endpoint, const std::string& why);
  Connection* add_connection(SessionPart* part, Pair pair, Nic* nic);
  void forget(SessionPart* part, Connection* failed);
  void mark_connected(Connection* connection);
  void mark_lost(Connection* connection, const std::string& why);
  void lose(Connection* connection, const std::string& why);
  bool read_events(Nic* nic);
  void on_request(Nic* nic, const uint8_t* entry, size_t size);
  SessionPart* match_request(const Nic& nic, const uint8_t* data, size_t size, int* remote) const;
  void check_deadlines(int64_t now);

  // group_fence.cpp
  void close_connections(SessionPart* part, const std::vector<Connection*>& which);
  RdmEndpoint* retire_rdm(NicPart* on, bool up);
  void abandon(Connection* connection, RdmEndpoint* condemned);
  void abandon(Receiver* receiver, Nic* nic, RdmEndpoint* condemned);
  void abandon(Op* op, Nic* nic, RdmEndpoint* condemned);
  void release_retired();
  template <class T>
  void close(Fid<T>* object, const Nic& nic) {
    const int code = object->close();
    if (code != 0 && !not_closed_) not_closed_ = hub_.library.check("fi_close", code, nic.label());
  }
  Error close_memory(std::vector<Prepared>* closing) const;  // any thread
  void say_fenced(const std::shared_ptr<FenceTicket>& ticket, const Error& error);
  void release_condemned(int64_t now);
  void end_programs(SessionPart* part);
  void say_lost(int64_t session, Pair pair, const std::string& why);

  // group_post.cpp
  void begin(const std::shared_ptr<Program>& program, const Error& error);
  bool pump();
  bool pump_urgent();
  bool pump_part(SessionPart* part);
  int take_turn(Program* program, int most, bool urgent, bool* refused);
  int post_run(Connection* connection, Program* program, int budget, bool urgent, bool* refused);
  bool refused_too_long(Connection* connection);
  void ring(Connection* connection);
  void ring_bells();
  Connection* choose(SessionPart* part, const Program& program, bool urgent, bool* usable);
  Error build(const Program& program, const Connection& connection, uint64_t cap, Write* write);
  ssize_t post_write(Connection* connection, Program* program, const Write& write, bool more);
  bool pump_probes();
  ssize_t post_probe(Connection* connection);
  void want_probe(Connection* connection);
  void enqueue(Program* program, bool urgent);
  void dequeue(Program* program);
  void disarm(Program* program);
  void maybe_end(Program* program);

  // group_complete.cpp
  static constexpr size_t kCompletionBatch = 64;
  size_t read_completions(Nic* nic);
  void on_error_entry(Nic* nic);
  void on_dead_queue(Nic* nic, ssize_t code);
  void on_receive(Op* op, const std::string& failure);
  Error post_receives(Receiver* receiver);
  void post_owed_receives();
  void on_immediate(Nic* nic, uint32_t value);
  void on_probe_arrived(Nic* nic);
  void check_probed(Connection* connection);
  void ease_loopback(const Connection& connection) const;
  void finish_op(Op* op, const std::string& failure, int64_t now);
  void settle_op(Op* op, const std::string& failure, int64_t now);
  void fail(const std::shared_ptr<Transfer>& transfer, Pair pair, const std::string& why);
  void flush_failures();

  Hub& hub_;
  Fd wake_;
  std::thread thread_;
  Registrar registrar_;  // runs where the provider pins
  std::atomic<bool> stopping_{false};
  std::atomic<bool> sleeping_{false};

  std::mutex commands_mutex_;
  std::vector<Command> commands_;
  std::atomic<bool> has_commands_{false};

  // The group's thread only.
  OpPool ops_{&contexts};
  std::map<int, std::map<int, std::vector<Registration>>> base_registrations_;  // region, NIC
  // Regions that are being registered, and what waits for them.
  std::map<int, std::vector<std::function<void(const Error&)>>> registering_;
  std::vector<std::unique_ptr<Watch>> watches_;
  std::map<int64_t, std::unique_ptr<SessionPart>> parts_;
  std::unordered_map<fid_t, Connection*> endpoints_;
  std::vector<std::unique_ptr<RdmEndpoint>> condemned_;
  std::vector<Retired> retired_;
  Error not_closed_;  // of the fence or close() that runs: what the peer may still write to
  std::deque<Program*> urgent_;  // with a layer that was just raised: posted before anything else
  std::vector<std::shared_ptr<Transfer>> failures_;  // whose `failed` is still to be said
  int64_t last_active_ns_ = 0;
  int64_t turn_ns_ = 0;  // when this turn of the loop began
  int64_t events_due_ns_ = 0;
  int64_t next_deadline_ns_ = 0;  // 0: none
  unsigned probes_waiting_ = 0;
  unsigned empty_wakeups_ = 0;
  bool receives_owed_ = false;  // of some endpoint
  bool bells_owed_ = false;    // of some connection
  bool blocked_ = false;  // a post was refused (EAGAIN): try again soon
};

}  // namespace pdnode
