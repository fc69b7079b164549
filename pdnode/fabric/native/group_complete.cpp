// Completions: what came back, and what arrived.

#include <rdma/fi_errno.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "group.hpp"
#include "sockets.hpp"

namespace pdnode {

// Entries read; a full batch, or an error entry (kCompletionBatch), may have more behind it.
size_t Group::read_completions(Nic* nic) {
  if (!nic->dead.empty()) return 0;
  std::array<fi_cq_data_entry, kCompletionBatch> entries;
  const ssize_t count = fi_cq_read(nic->queues.cq.get(), entries.data(), entries.size());
  if (count == -FI_EAGAIN) {
    if (++nic->empty_run == kEmptyRun) {
      nic->empty_run = 0;
      ++nic->empty_runs;
    }
    return 0;
  }
  nic->empty_run = 0;
  if (count == -FI_EAVAIL) {
    ++nic->entries_read;
    on_error_entry(nic);
    return kCompletionBatch;
  }
  if (count <= 0) {
    if (count != 0) on_dead_queue(nic, count);
    return 0;
  }
  nic->entries_read += static_cast<uint64_t>(count);
  const int64_t now = now_ns();
  for (ssize_t i = 0; i < count; ++i) {
    const fi_cq_data_entry& entry = entries[static_cast<size_t>(i)];
    if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
      on_immediate(nic, static_cast<uint32_t>(entry.data));
      // Without posted receives the context of an arrival is none of ours.
      if (nic->limits.posts_receives && entry.op_context != nullptr) {
        finish_op(reinterpret_cast<Op*>(entry.op_context), "", now);
      }
    } else if (entry.op_context != nullptr) {
      Op* op = reinterpret_cast<Op*>(entry.op_context);
      finish_op(op, "", now);
    }
  }
  return static_cast<size_t>(count);
}

// Nothing more can be heard of this NIC's operations: it is out until the fabric is closed.
void Group::on_dead_queue(Nic* nic, ssize_t code) {
  nic->dead = hub_.library.check("fi_cq_read", code, nic->label()).text();
  for (auto& [id, part] : parts_) {
    for (auto& connection : part->connections) {
      if (connection->nic == nic) lose(connection.get(), nic->dead);
    }
  }
}

void Group::on_error_entry(Nic* nic) {
  // Newer libraries write longer entries than our headers know.
  alignas(fi_cq_err_entry) std::array<uint8_t, 512> buffer{};
  auto* failure = reinterpret_cast<fi_cq_err_entry*>(buffer.data());
  if (fi_cq_readerr(nic->queues.cq.get(), failure, 0) < 0 || failure->op_context == nullptr) {
    return;
  }
  // A target that refuses a write has no context of ours to report.
  if ((failure->flags & FI_REMOTE_WRITE) != 0 && !nic->limits.posts_receives) return;
  Op* op = reinterpret_cast<Op*>(failure->op_context);
  Connection* connection = op->connection;
  const int code = failure->err != 0 ? failure->err : FI_EIO;
  const std::string why = hub_.library.check("write", -code, nic->label()).text();
  finish_op(op, why, now_ns());
  if (connection != nullptr) mark_lost(connection, why);
}

// One operation has come back; `failure` is empty for success.
void Group::finish_op(Op* op, const std::string& failure, int64_t now) {
  if (op->kind == Op::Kind::kAbandoned) {
    if (op->condemned == nullptr) return;  // `retired_` has it
    --op->condemned->abandoned;
    ops_.give(op);
    return;
  }
  if (op->kind == Op::Kind::kReceive) {
    on_receive(op, failure);
  } else {
    settle_op(op, failure, now);
  }
  ops_.give(op);
}

// A receive is used up: the next one takes its place, unless the endpoint is at its end.
void Group::on_receive(Op* op, const std::string& failure) {
  Receiver* receiver = op->receiver;
  receiver->unlink(op);
  if (receiver->ep == nullptr) return;
  std::string why = failure;
  if (why.empty()) {
    ++receiver->owed;
    why = post_receives(receiver).text();
  }
  if (!why.empty()) lose_all(receiver->ep, why);
}

// Where an endpoint has no receive at all, and none can be posted for so long, it is of no use.
Error Group::post_receives(Receiver* receiver) {
  while (receiver->ep != nullptr && receiver->owed > 0) {
    Op* op = ops_.take();
    op->kind = Op::Kind::kReceive;
    const auto code = fi_recv(receiver->ep, nullptr, 0, nullptr, FI_ADDR_UNSPEC, &op->context);
    if (code != 0) {
      ops_.give(op);
      if (code != -FI_EAGAIN) return hub_.library.check("fi_recv", code, hub_.provider.name);
      receives_owed_ = true;
      if (receiver->refused_ns == 0) receiver->refused_ns = turn_ns_;
      const bool useless = receiver->ops == nullptr && turn_ns_ - receiver->refused_ns >= kRefusedNs;
      return useless ? Error("fi_recv: try again, for 3 s") : Error();
    }
    receiver->refused_ns = 0;
    --receiver->owed;
    receiver->link(op);
  }
  return Error();
}

void Group::post_owed_receives() {
  receives_owed_ = false;
  for (auto& [id, part] : parts_) {
    for (auto& connection : part->connections) {
      if (connection->state == Connection::State::kLost) continue;
      if (Error error = post_receives(&connection->receiver)) {
        mark_lost(connection.get(), error.text());
      }
    }
    for (auto& [nic, on] : part->nics) {
      if (!on.rdm) continue;
      if (Error error = post_receives(&on.rdm->receiver)) lose_all(on.rdm->ep.get(), error.text());
    }
  }
}

// Takes it off its connection and tells whom it concerns; the memory stays the op's.
void Group::settle_op(Op* op, const std::string& failure, int64_t now) {
  Connection* connection = op->connection;
  connection->unlink(op);
  connection->refused_ns = 0;
  switch (op->kind) {
    case Op::Kind::kProbe:
      connection->probe_done = connection->probe_done || failure.empty();
      check_probed(connection);
      return;
    case Op::Kind::kPages:
      break;
    default:
      return;
  }
  Program* program = op->program;
  program->outstanding -= 1;
  program->records[op->layer].done_ns = now;
  Volume Flow::*volume = failure.empty() ? &Flow::done : &Flow::failed;
  (connection->nic->flow.*volume).add(op->bytes, op->pages);
  (connection->flow->*volume).add(op->bytes, op->pages);
  if (!failure.empty()) fail(program->transfer, connection->pair, failure);
  maybe_end(program);
}

// The connection is no good any more, though its operations are still out.
void Group::lose(Connection* connection, const std::string& why) {
  for (const Op* op = connection->ops; op != nullptr; op = op->next) {
    if (op->kind == Op::Kind::kPages) fail(op->program->transfer, connection->pair, why);
  }
  mark_lost(connection, why);
}

void Group::fail(const std::shared_ptr<Transfer>& transfer, Pair pair, const std::string& why) {
  if (transfer->note_failure(pair, why)) failures_.push_back(transfer);
}

// Said after a whole batch of completions, so that the event names every pair that failed in it.
void Group::flush_failures() {
  while (!failures_.empty()) {
    const std::vector<std::shared_ptr<Transfer>> failures = std::move(failures_);
    failures_.clear();
    for (const auto& transfer : failures) {
      Event event;
      event.kind = EventKind::kFailed;
      event.session = transfer->session;
      event.transfer = transfer->id;
      event.text = transfer->failure_text();
      event.pairs = transfer->failed_pairs();
      hub_.events.push(std::move(event));
      for (auto& slot : hub_.groups) {
        Group* group = slot.load(std::memory_order_acquire);
        if (group != nullptr && group != this) {
          group->post([transfer](Group& other) { other.halt(transfer); });
        }
      }
      halt(transfer);
      transfer->drop_token(&hub_.events);
      transfer->drop_unit(&hub_.events);
    }
  }
}

void Group::on_immediate(Nic* nic, uint32_t value) {
  const Immediate immediate(value);
  if (immediate.slot == 0) {
    on_probe_arrived(nic);
    return;
  }
  const SlotOutcome outcome = hub_.slots.count(immediate);
  if (outcome.late) hub_.counters.late_immediates.fetch_add(1, std::memory_order_relaxed);
  if (outcome.early) hub_.counters.early_immediates.fetch_add(1, std::memory_order_relaxed);
  // Before the events: who hears of them finds the figures there.
  nic->flow.received_units.add(immediate.weight);
  if (SessionPart* part = find_part(outcome.session)) {
    for (auto& connection : part->connections) {
      if (connection->nic == nic) {
        connection->flow->received_units.add(immediate.weight);
        break;
      }
    }
  }
  Event event;
  event.session = outcome.session;
  event.slot = static_cast<int>(immediate.slot);
  event.generation = static_cast<int>(immediate.generation);
  event.count = static_cast<int64_t>(outcome.count);
  if (outcome.reached) {
    event.kind = EventKind::kReached;
    hub_.events.push(event);
  }
  if (outcome.overshoot) {
    hub_.counters.overshoots.fetch_add(1, std::memory_order_relaxed);
    event.kind = EventKind::kOvershoot;
    hub_.events.push(event);
  }
}

// An arrival does not say whose it is; the word that it wrote does.
void Group::on_probe_arrived(Nic* nic) {
  for (auto& [id, part] : parts_) {
    const auto on = part->nics.find(nic->number);
    if (on == part->nics.end() || !on->second.memory.scratch) continue;
    for (auto& connection : part->connections) {
      if (connection->nic == nic) check_probed(connection.get());
    }
  }
}

void Group::check_probed(Connection* connection) {
  if (connection->state != Connection::State::kUp || connection->probed) return;
  const NicPart& on = connection->part->nics[connection->pair.first];
  // The device may be writing it.
  const uint64_t word = __atomic_load_n(
      reinterpret_cast<const uint64_t*>(on.memory.scratch.get()) + connection->pair.second,
      __ATOMIC_ACQUIRE);
  connection->peer_probed = connection->peer_probed || word != 0;
  if (connection->peer_probed && std::exchange(connection->probe_held, false)) {
    want_probe(connection);
  }
  if (!connection->probe_done || !connection->peer_probed) return;
  connection->probed = true;
  connection->deadline_ns = 0;
  if (hub_.provider.kernel_sockets) ease_loopback(*connection);
  Event event;
  event.kind = EventKind::kProbed;
  event.session = connection->part->shared->id;
  event.pair = connection->pair;
  hub_.events.push(std::move(event));
}

void Group::ease_loopback(const Connection& connection) const {
  sockaddr_storage own{}, peer{};
  size_t size = sizeof own;
  if (fi_getname(&connection.ep->fid, &own, &size) != 0) return;
  const auto& address = connection.address;
  if (address.empty()) {
    stop_pacing_on_loopback(own, nullptr);
    return;
  }
  std::memcpy(&peer, address.data(), std::min(address.size(), sizeof peer));
  stop_pacing_on_loopback(own, &peer);
}

}  // namespace pdnode
