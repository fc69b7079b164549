// Posting: layer programs become writes.

#include <rdma/fi_errno.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "group.hpp"

namespace pdnode {

namespace {

constexpr const char* kRefused = "fi_writemsg: try again, for 3 s";

}  // namespace

// One operation: up to kMaxSegments pieces, each one page or a run of whole pages.
struct Group::Write {
  std::array<iovec, kMaxSegments> source;
  std::array<void*, kMaxSegments> descriptors;
  std::array<fi_rma_iov, kMaxSegments> target;
  size_t segments = 0;
  uint32_t pages = 0;
  uint64_t bytes = 0;
  Cursor next;  // where the program stands once this is posted
};

void Group::submit(const std::shared_ptr<Program>& program) {
  program->records.resize(program->layers);
  need_region(program->region, [this, program](const Error& error) { begin(program, error); });
}

void Group::begin(const std::shared_ptr<Program>& program, const Error& error) {
  SessionPart* part = find_part(program->transfer->session);
  if (part == nullptr || error) {
    fail(program->transfer, {-1, -1}, error ? error.text() : "the session is closed");
    program->ended = true;
    program->transfer->drop_unit(&hub_.events);
    return;
  }
  program->part = part;
  part->programs.push_back(program);
  if (program->spans.empty()) program->cursor.layer = program->layers;
  maybe_end(program.get());  // nothing to write, or nothing may be written
  if (program->ended) return;
  if (program->counter < 0) {
    program->due = program->layers;
    const int64_t now = now_ns();
    for (LayerRecord& record : program->records) record.raised_ns = now;
    enqueue(program.get(), false);
    return;
  }
  const auto watch = std::find_if(
      watches_.begin(), watches_.end(),
      [&program](const auto& one) { return one->counter == program->counter; });
  if (watch == watches_.end()) {
    fail(program->transfer, {-1, -1}, "the layer counter is gone");
    return;
  }
  // The other programs' layers are looked at as well, so that `seen` stays true for all of them.
  (*watch)->armed.push_back(program.get());
  (*watch)->seen = (*watch)->page->value().load(std::memory_order_acquire);
  raise(watch->get(), (*watch)->seen);
}

void Group::halt(const std::shared_ptr<Transfer>& transfer) {
  SessionPart* part = find_part(transfer->session);
  if (part == nullptr) return;
  const std::vector<std::shared_ptr<Program>> programs = part->programs;
  for (const auto& program : programs) {
    if (program->transfer != transfer) continue;
    dequeue(program.get());
    disarm(program.get());
    maybe_end(program.get());
  }
}

void Group::enqueue(Program* program, bool urgent) {
  if (program->queued || program->cursor.layer >= program->due) return;
  program->queued = true;
  program->urgent = urgent;
  (urgent ? urgent_ : program->part->ready).push_back(program);
}

void Group::dequeue(Program* program) {
  if (!program->queued) return;
  auto& queue = program->urgent ? urgent_ : program->part->ready;
  queue.erase(std::find(queue.begin(), queue.end(), program));
  program->queued = false;
}

void Group::disarm(Program* program) {
  for (auto& watch : watches_) {
    auto& armed = watch->armed;
    armed.erase(std::remove(armed.begin(), armed.end(), program), armed.end());
  }
}

void Group::maybe_end(Program* program) {
  if (program->ended || program->outstanding > 0) return;
  if (!program->transfer->halted() && program->cursor.layer < program->layers) return;
  program->ended = true;
  dequeue(program);
  disarm(program);
  auto& all = program->part->programs;
  const auto found = std::find_if(all.begin(), all.end(),
                                  [program](const auto& one) { return one.get() == program; });
  const std::shared_ptr<Program> last = std::move(*found);
  all.erase(found);
  last->part = nullptr;
  last->spans = std::vector<Span>();
  last->region.reset();
  last->transfer->drop_unit(&hub_.events);
}

bool Group::pump() {
  if (receives_owed_) post_owed_receives();
  if (bells_owed_) ring_bells();
  bool any = probes_waiting_ > 0 && pump_probes();
  blocked_ = false;
  any |= pump_urgent();
  for (auto& [id, part] : parts_) {
    if (!part->ready.empty()) any |= pump_part(part.get());
    any |= pump_urgent();
  }
  return any;
}

// Each once; what is left of its layers then goes on in turn with the others.
bool Group::pump_urgent() {
  bool any = false;
  while (!urgent_.empty()) {
    Program* program = urgent_.front();
    urgent_.pop_front();
    bool refused = false;
    any |= take_turn(program, kBatch, true, &refused) > 0;
    blocked_ |= refused;
  }
  return any;
}

bool Group::pump_part(SessionPart* part) {
  bool any = false;
  bool refused = false;
  int budget = kBatch;
  // In turns, until every program has had one without result: none waits behind one that has no
  // room. Several connections get short runs each, so that all NICs work on few writes as well.
  const int run = part->connections.size() > 1 ? kRailRun : kBatch;
  size_t fruitless = 0;
  while (budget > 0 && fruitless < part->ready.size() && urgent_.empty() && !refused) {
    Program* program = part->ready.front();
    part->ready.pop_front();
    const int posted = take_turn(program, std::min(budget, run), false, &refused);
    budget -= posted;
    any |= posted > 0;
    fruitless = posted > 0 ? 0 : fruitless + 1;
  }
  blocked_ |= refused;
  return any;
}

// Posts up to `most` writes of a program that was taken off its queue, and queues it again.
int Group::take_turn(Program* program, int most, bool urgent, bool* refused) {
  program->queued = false;
  if (program->transfer->halted()) {
    maybe_end(program);
    return 0;
  }
  bool usable = false;
  Connection* connection = choose(program->part, *program, urgent, &usable);
  if (!usable) {
    fail(program->transfer, {-1, -1}, "no connection to rank " +
                                          std::to_string(program->remote_rank) +
                                          " of the peer is up");
    maybe_end(program);
    return 0;
  }
  int posted = 0;
  if (connection != nullptr) posted = post_run(connection, program, most, urgent, refused);
  enqueue(program, false);
  return posted;
}

Connection* Group::choose(SessionPart* part, const Program& program, bool urgent, bool* usable) {
  if (!part->remote) return nullptr;
  const auto region = part->remote->find(program.remote_rank);
  if (region == part->remote->end()) return nullptr;
  const size_t count = part->connections.size();
  for (size_t i = 0; i < count; ++i) {
    const size_t index = (part->next_connection + i) % count;
    Connection* connection = part->connections[index].get();
    // Only what has been proved both ways: a NIC that returns may take connections and no data.
    const bool up = connection->state == Connection::State::kUp && connection->probed;
    const std::optional<Pair>& only = program.transfer->only;
    if (only && connection->pair != *only) continue;
    if (!up || region->second.pieces.count(connection->pair.second) == 0) continue;
    *usable = true;
    if (!connection->has_room(urgent)) continue;
    part->next_connection = (index + 1) % count;
    return connection;
  }
  return nullptr;
}

int Group::post_run(Connection* connection, Program* program, int budget, bool urgent,
                    bool* refused) {
  int posted = 0;
  Write write;
  const bool doorbell = hub_.provider.doorbell;
  while (posted < budget && connection->has_room(urgent) &&
         program->cursor.layer < program->due) {
    // While layers are still to come, posts stay short: no counter is looked at during one.
    const bool awaited = program->counter >= 0 && program->due < program->layers;
    const uint64_t cap = awaited ? kUrgentBytes : kMergedBytes;
    if (Error error = build(*program, *connection, cap, &write)) {
      fail(program->transfer, connection->pair, error.text());
      break;
    }
    const bool more = doorbell && posted + 1 < budget &&
                      connection->writes + 1 < connection->nic->limits.window_writes &&
                      connection->bytes + write.bytes < kWindowBytes &&
                      write.next.layer < program->due;
    const ssize_t code = post_write(connection, program, write, more);
    if (code == -FI_EAGAIN) {
      *refused = true;
      if (refused_too_long(connection)) {
        fail(program->transfer, connection->pair, kRefused);
        lose(connection, kRefused);
        *refused = false;
      }
      break;
    }
    if (code != 0) {
      const std::string why = hub_.library.check("fi_writemsg", code, hub_.provider.name).text();
      fail(program->transfer, connection->pair, why);
      mark_lost(connection, why);
      break;
    }
    ++posted;
    // Where a post ends in a system call, one takes as long as a layer may wait.
    if (look_counters() && !doorbell && !urgent) break;
  }
  if (connection->bell_owed) ring(connection);
  return posted;
}

// A device that takes nothing and gives nothing back: some providers go on like that for ever, for
// example while they try to connect again behind our back.
bool Group::refused_too_long(Connection* connection) {
  const int64_t now = now_ns();
  // Nobody may have had anything to post since the last one: then this is the first of others.
  const bool long_ago = now - connection->refused_last_ns >= kRefusedGapNs;
  if (connection->refused_ns == 0 || long_ago) connection->refused_ns = now;
  connection->refused_last_ns = now;
  return now - connection->refused_ns >= kRefusedNs;
}

// FI_MORE promises another post at once. Where a batch ends without one (it was refused, the next
// write cannot be built, its transfer was stopped), the device may keep what it has for ever: a
// write of the probe's word, which changes nothing, makes it start.
void Group::ring(Connection* connection) {
  // A lost connection too: what the device keeps for it would come back only at the fence.
  const ssize_t code = post_probe(connection);
  if (code == 0) return;
  if (code == -FI_EAGAIN && !refused_too_long(connection)) {
    bells_owed_ = true;
    return;
  }
  connection->bell_owed = false;
  lose(connection, code == -FI_EAGAIN
                       ? kRefused
                       : hub_.library.check("fi_writemsg", code, hub_.provider.name).text());
}

void Group::ring_bells() {
  bells_owed_ = false;
  for (auto& [id, part] : parts_) {
    for (auto& connection : part->connections) {
      if (connection->bell_owed) ring(connection.get());
    }
  }
}

Error Group::build(const Program& program, const Connection& connection, uint64_t cap,
                   Write* write) {
  // choose() has found both.
  const RemoteRegion& region = program.part->remote->find(program.remote_rank)->second;
  const auto& pieces = region.pieces.find(connection.pair.second)->second;
  const Limits& limits = connection.nic->limits;
  cap = std::min<uint64_t>(cap, limits.message_bytes);
  write->segments = 0;
  write->pages = 0;
  write->bytes = 0;
  Cursor at = program.cursor;
  const uint64_t source_layer = program.source_offset + at.layer * program.source_layer_stride;
  const uint64_t remote_layer = program.remote_offset + at.layer * program.remote_layer_stride;
  while (write->segments < limits.segments && at.span < program.spans.size()) {
    if (write->segments > 0 &&
        (write->bytes + program.length > cap || write->pages >= kMaxPages)) {
      break;
    }
    const Span& span = program.spans[at.span];
    const uint64_t source = source_layer + (span.source + at.page) * program.source_page_stride;
    const uint64_t remote =
        remote_layer + (span.destination + at.page) * program.remote_page_stride;
    uint64_t count = 1;
    if (program.whole_page) {
      const uint64_t fitting = std::max<uint64_t>(1, (cap - write->bytes) / program.length);
      count = std::min({span.count - at.page, fitting, uint64_t{kMaxPages} - write->pages});
    }
    const RemotePiece* there = region.find(pieces, remote);
    if (there == nullptr || there->offset + there->length - remote < program.length) {
      return Error("remote offset " + std::to_string(remote) + " is outside of what rank " +
                   std::to_string(program.remote_rank) + " has registered");
    }
    count = std::min(count, (there->offset + there->length - remote) / program.length);
    void* descriptor = nullptr;
    if (limits.local_registration) {
      const Registration* here =
          local_piece(program.region->number, connection.nic->number, source);
      if (here == nullptr || here->offset + here->length - source < program.length) {
        return Error("source offset " + std::to_string(source) + " is not registered");
      }
      count = std::min(count, (here->offset + here->length - source) / program.length);
      descriptor = fi_mr_desc(here->mr.get());
    }
    const uint64_t bytes = count * program.length;
    write->source[write->segments] = {program.region->data() + source, bytes};
    write->descriptors[write->segments] = descriptor;
    write->target[write->segments] = {there->base + (remote - there->offset), bytes, there->key};
    ++write->segments;
    write->pages += static_cast<uint32_t>(count);
    write->bytes += bytes;
    at.page += count;
    if (at.page == span.count) {
      ++at.span;
      at.page = 0;
    }
  }
  if (at.span == program.spans.size()) at = {at.layer + 1, 0, 0};
  write->next = at;
  return Error();
}

ssize_t Group::post_write(Connection* connection, Program* program, const Write& write,
                          bool more) {
  Op* op = ops_.take();
  op->kind = Op::Kind::kPages;
  op->program = program;
  op->bytes = write.bytes;
  op->pages = write.pages;
  op->layer = program->cursor.layer;
  fi_msg_rma message = {};
  message.msg_iov = write.source.data();
  message.desc = const_cast<void**>(write.descriptors.data());
  message.iov_count = write.segments;
  message.addr = connection->peer;
  message.rma_iov = write.target.data();
  message.rma_iov_count = write.segments;
  message.context = &op->context;
  message.data = program->transfer->immediate | write.pages;
  const uint64_t flags = FI_COMPLETION | FI_REMOTE_CQ_DATA | hub_.provider.delivery_flag |
                         (more ? FI_MORE : 0);
  LayerRecord& record = program->records[op->layer];
  const int64_t entered = record.posted_ns == 0 ? now_ns() : record.posted_ns;
  const ssize_t code = fi_writemsg(connection->ep, &message, flags);
  if (code != 0) {
    ops_.give(op);
    return code;
  }
  connection->refused_ns = 0;
  connection->bell_owed = more;
  op->posted_ns = turn_ns_;
  record.posted_ns = entered;
  record.bytes += write.bytes;
  record.writes += 1;
  program->cursor = write.next;
  program->outstanding += 1;
  connection->link(op);
  connection->nic->flow.posted.add(write.bytes, write.pages);
  connection->flow->posted.add(write.bytes, write.pages);
  return 0;
}

void Group::probe(int64_t session, bool answer) {
  SessionPart* part = find_part(session);
  if (part == nullptr) return;
  for (auto& connection : part->connections) {
    if (connection->state != Connection::State::kUp || connection->probe_wanted ||
        connection->probed) {
      continue;
    }
    // The peer's probe proves that it knows our address: where addresses must be known on both
    // sides, a write before that comes back as cancelled.
    connection->probe_held = answer && !connection->peer_probed;
    if (!connection->probe_held) want_probe(connection.get());
    connection->deadline_ns = now_ns() + connection->patience_ns;
  }
}

void Group::want_probe(Connection* connection) {
  connection->probe_wanted = !connection->probe_done;
  probes_waiting_ += connection->probe_wanted ? 1 : 0;
}

bool Group::pump_probes() {
  bool any = false;
  for (auto& [id, part] : parts_) {
    for (auto& connection : part->connections) {
      if (!connection->probe_wanted) continue;
      const ssize_t code = post_probe(connection.get());
      if (code == -FI_EAGAIN) continue;
      if (code != 0) {
        mark_lost(connection.get(),
                  hub_.library.check("probe", code, hub_.provider.name).text());
        continue;
      }
      connection->probe_wanted = false;
      --probes_waiting_;
      any = true;
    }
  }
  return any;
}

ssize_t Group::post_probe(Connection* connection) {
  SessionPart* part = connection->part;
  const RemotePiece* there = nullptr;
  if (part->remote) {
    const auto region = part->remote->find(kScratch);
    if (region != part->remote->end()) {
      const auto pieces = region->second.pieces.find(connection->pair.second);
      if (pieces != region->second.pieces.end()) there = &pieces->second.front();
    }
  }
  if (there == nullptr || there->length < kScratchBytes) return -FI_ENOKEY;
  NicPart& on = part->nics[connection->pair.first];
  uint8_t* word = on.memory.scratch.get() + kProbeSourceOffset;
  const uint64_t one = 1;
  std::memcpy(word, &one, sizeof one);
  Op* op = ops_.take();
  op->kind = Op::Kind::kProbe;
  op->bytes = sizeof one;
  op->pages = 0;
  void* descriptor = connection->nic->limits.local_registration
                         ? fi_mr_desc(on.memory.scratch_registration.mr.get())
                         : nullptr;
  iovec source = {word, sizeof one};
  fi_rma_iov target = {there->base + 8 * static_cast<uint64_t>(connection->pair.first),
                       sizeof one, there->key};
  fi_msg_rma message = {};
  message.msg_iov = &source;
  message.desc = &descriptor;
  message.iov_count = 1;
  message.addr = connection->peer;
  message.rma_iov = &target;
  message.rma_iov_count = 1;
  message.context = &op->context;
  message.data = 1;  // slot 0
  const ssize_t code = fi_writemsg(connection->ep, &message,
                                   FI_COMPLETION | FI_REMOTE_CQ_DATA |
                                       hub_.provider.delivery_flag);
  if (code != 0) {
    ops_.give(op);
    return code;
  }
  connection->bell_owed = false;
  op->posted_ns = turn_ns_;
  connection->link(op);
  return 0;
}

}  // namespace pdnode
