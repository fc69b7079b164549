// The fence: after it, no byte of the peer can land any more.

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "group.hpp"

namespace pdnode {

namespace {

// A condemned endpoint with nothing outstanding is not connecting any more after this long.
constexpr int64_t kCondemnedNs = 5'000'000'000;
constexpr int kMostBatches = 1024;  // of completions read for one fence
constexpr int kEmptyReads = 8;

}  // namespace

// Takes the connections out of the session: no operation is outstanding on them afterwards. On
// FI_EP_RDM `which` has all pairs of the NICs it touches, since they share an endpoint.
void Group::close_connections(SessionPart* part, const std::vector<Connection*>& which) {
  std::map<int, RdmEndpoint*> condemned;
  std::map<int, bool> up;
  for (Connection* connection : which) {
    up[connection->pair.first] = up[connection->pair.first] || connection->probed;
    if (connection->state == Connection::State::kUp) hub_.counters.connections.fetch_sub(1);
    connection->state = Connection::State::kLost;  // nothing is posted on it any more
    if (connection->probe_wanted) --probes_waiting_;
    connection->probe_wanted = false;
    if (connection->own) {
      endpoints_.erase(&connection->own->fid);
      connection->receiver.ep = nullptr;
      close(&connection->own, *connection->nic);  // here the last byte of this peer has landed
    }
  }
  for (const auto& [nic, probed] : up) {
    condemned[nic] = retire_rdm(&part->nics[nic], probed);
  }
  // What arrived over the closed endpoints, and what the provider gives back for them, is in the
  // queue now: read it empty once. Bounded, because other peers go on filling it. One "try again"
  // does not prove that it is empty.
  for (const auto& [number, unused] : up) {
    Nic* nic = find_nic(number);
    int empty = 0;
    for (int batch = 0; batch < kMostBatches && empty < kEmptyReads; ++batch) {
      empty = read_completions(nic) == 0 ? empty + 1 : 0;
    }
  }
  for (Connection* connection : which) {
    abandon(connection, condemned[connection->pair.first]);
    abandon(&connection->receiver, connection->nic, nullptr);
    const auto& scratch = part->nics[connection->pair.first].memory.scratch;
    if (scratch) std::memset(scratch.get() + 8 * connection->pair.second, 0, 8);
  }
  auto& all = part->connections;
  all.erase(std::remove_if(all.begin(), all.end(),
                           [&which](const std::unique_ptr<Connection>& one) {
                             return std::find(which.begin(), which.end(), one.get()) !=
                                    which.end();
                           }),
            all.end());
}

void Group::abandon(Connection* connection, RdmEndpoint* condemned) {
  const int64_t now = now_ns();
  while (connection->ops != nullptr) {
    Op* op = connection->ops;
    settle_op(op, "the connection was closed", now);
    abandon(op, connection->nic, condemned);
  }
}

void Group::abandon(Receiver* receiver, Nic* nic, RdmEndpoint* condemned) {
  receiver->ep = nullptr;
  while (receiver->ops != nullptr) {
    Op* op = receiver->ops;
    receiver->unlink(op);
    abandon(op, nic, condemned);
  }
}

void Group::abandon(Op* op, Nic* nic, RdmEndpoint* condemned) {
  op->kind = Op::Kind::kAbandoned;
  op->condemned = condemned;
  if (condemned != nullptr) {
    ++condemned->abandoned;
    return;
  }
  if (retired_.empty() || retired_.back().nic != nic ||
      retired_.back().entries_read != nic->entries_read ||
      retired_.back().empty_runs != nic->empty_runs) {
    retired_.push_back({nic, nic->entries_read, nic->empty_runs, {}});
  }
  retired_.back().ops.push_back(op);
}

// The endpoint is closed, so nothing new comes of these operations. What the queue still held then
// has been read once as many entries as it holds have been, or once it was empty from a run's first
// read to its last (one run may have begun before).
void Group::release_retired() {
  const auto first_kept = std::remove_if(retired_.begin(), retired_.end(), [this](Retired& one) {
    const bool all_read = one.nic->entries_read - one.entries_read >= kCompletionQueueEntries;
    if (!all_read && one.nic->empty_runs - one.empty_runs < 2) return false;
    for (Op* op : one.ops) ops_.give(op);
    return true;
  });
  retired_.erase(first_kept, retired_.end());
}

// `up`: one of its connections is known to be established, so that it can be closed. Pages are
// posted only then, so a condemned endpoint has nothing outstanding but probes.
RdmEndpoint* Group::retire_rdm(NicPart* on, bool up) {
  std::unique_ptr<RdmEndpoint> rdm = std::move(on->rdm);
  if (!rdm) return nullptr;
  const bool closes = up || hub_.provider.closes_any_time;
  abandon(&rdm->receiver, on->nic, closes ? nullptr : rdm.get());
  if (closes) {
    close(&rdm->ep, *on->nic);
    rdm->av.reset();
    return nullptr;
  }
  rdm->scratch = std::move(on->memory.scratch);
  rdm->condemned_ns = now_ns();
  condemned_.push_back(std::move(rdm));
  return condemned_.back().get();
}

void Group::release_condemned(int64_t now) {
  for (size_t i = 0; i < condemned_.size();) {
    RdmEndpoint& rdm = *condemned_[i];
    if (rdm.abandoned == 0 && now - rdm.condemned_ns > kCondemnedNs) {
      rdm.ep.reset();
      rdm.av.reset();
      condemned_.erase(condemned_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

void Group::end_programs(SessionPart* part) {
  const std::vector<std::shared_ptr<Program>> programs = part->programs;
  for (const auto& program : programs) {
    fail(program->transfer, {-1, -1}, "the session was fenced");
    maybe_end(program.get());
  }
}

void Group::fail_all(const std::vector<std::shared_ptr<Transfer>>& transfers) {
  for (const auto& transfer : transfers) fail(transfer, {-1, -1}, "the session was fenced");
  flush_failures();
}

void Group::fence(const std::shared_ptr<FenceTicket>& ticket) {
  not_closed_ = Error();
  SessionPart* part = find_part(ticket->session);
  const bool whole = ticket->pair.first < 0;
  auto closing_memory = std::make_shared<std::vector<Prepared>>();
  if (part != nullptr) {
    std::vector<Connection*> closing;
    for (const auto& connection : part->connections) {
      // An endpoint that several pairs of a NIC share is closed for all of them.
      const bool shared = hub_.provider.endpoint == FI_EP_RDM &&
                          connection->pair.first == ticket->pair.first;
      if (whole || shared || connection->pair == ticket->pair) closing.push_back(connection.get());
    }
    close_connections(part, closing);
    for (auto& [nic, on] : part->nics) {
      if (!whole && nic != ticket->pair.first) continue;
      const bool in_use = std::any_of(
          part->connections.begin(), part->connections.end(),
          [number = nic](const auto& connection) { return connection->pair.first == number; });
      if (in_use) continue;
      retire_rdm(&on, false);
      closing_memory->push_back(std::move(on.memory));
      on.memory = Prepared();
      on.registered = false;
    }
    if (whole) {
      end_programs(part);
      parts_.erase(ticket->session);
    }
    flush_failures();
  }
  // Where registrations are the fence, `fenced` waits for their end.
  aside([this, closing_memory, ticket, error = not_closed_]() -> Command {
    const Error found = close_memory(closing_memory.get());
    return [ticket, error = error ? error : found](Group& on) { on.say_fenced(ticket, error); };
  });
}

Error Group::close_memory(std::vector<Prepared>* closing) const {
  Error error;
  const auto close_one = [&](Registration* piece) {
    const int code = piece->mr.close();
    if (code != 0 && !error) error = hub_.library.check("fi_close", code, hub_.provider.name);
  };
  for (Prepared& memory : *closing) {
    close_one(&memory.scratch_registration);
    for (auto& [region, pieces] : memory.regions) {
      for (Registration& piece : pieces) close_one(&piece);
    }
  }
  // What could not be closed may still be written to: its memory stays mapped.
  if (error) {
    static std::mutex mutex;
    static auto& kept = *new std::vector<Prepared>;
    const std::lock_guard<std::mutex> lock(mutex);
    for (Prepared& memory : *closing) kept.push_back(std::move(memory));
  }
  closing->clear();
  return error;
}

// `fenced` is a promise that no byte can land any more. Where the provider could not close what
// the peer writes through, it is never given: the session's pages stay quarantined.
void Group::say_fenced(const std::shared_ptr<FenceTicket>& ticket, const Error& error) {
  if (error) {
    say_lost(ticket->session, ticket->pair, "the fence failed: " + error.text());
    return;
  }
  if (ticket->groups.fetch_sub(1) != 1) return;
  Event event;
  event.kind = EventKind::kFenced;
  event.session = ticket->session;
  event.pair = ticket->pair;
  hub_.events.push(std::move(event));
}

}  // namespace pdnode
