// The wire: where writes wait, how they land, and what their sender hears of it.

#include <rdma/fi_errno.h>

#include <algorithm>

#include "fake.hpp"

namespace fake {

namespace {

// The device starts on all that the endpoint has posted.
void ring(const Ep& ep) {
  for (Write& write : world().wire) {
    if (write.from == ep.name) write.held = false;
  }
}

void push_completion(Ep* ep, Completion completion) {
  completion.of = ep->name;
  ep->cq->entries.push_back(completion);
  signal_fd(ep->cq->fd);
}

// The sender's own completion, once per write.
void complete(Write* write, int error) {
  if (write->completed) return;
  write->completed = true;
  Ep* from = find_endpoint(write->from);
  if (from == nullptr) return;
  --from->flying;
  world().contexts.erase(write->context);
  if (write->lost) return;
  push_completion(from, {write->context, FI_RMA | FI_WRITE, 0, error, 0});
}

void copy_payload(Write* write) {
  if (write->copied) return;
  write->copied = true;
  for (const Segment& one : write->segments) {
    write->payload.insert(write->payload.end(), one.source, one.source + one.length);
  }
}

// Where the segment goes, or null: unknown key, out of bounds, no right to write.
uint8_t* target_of(const Domain& domain, const Segment& one) {
  const auto found = domain.regions.find(one.key);
  if (found == domain.regions.end()) return nullptr;
  const Mr& mr = *found->second;
  const uint64_t base =
      world().rules.virtual_addresses != 0 ? reinterpret_cast<uint64_t>(mr.base) : 0;
  if ((mr.access & FI_REMOTE_WRITE) == 0 || one.address < base) return nullptr;
  const uint64_t offset = one.address - base;
  if (offset > mr.length || one.length > mr.length - offset) return nullptr;
  return mr.data + offset;
}

// A device is no thread: what it writes is ordered by its completions alone.
__attribute__((no_sanitize("thread"))) void copy_as_device(uint8_t* to, const uint8_t* from,
                                                           uint64_t size) {
  for (uint64_t i = 0; i < size; ++i) to[i] = from[i];
}

void move_bytes(const Write& write, const std::vector<uint8_t*>& targets) {
  const uint8_t* payload = write.payload.data();
  for (size_t i = 0; i < targets.size(); ++i) {
    const Segment& one = write.segments[i];
    copy_as_device(targets[i], write.copied ? payload : one.source, one.length);
    payload += one.length;
  }
}

// A queue pair in error: all that it has outstanding comes back; some of it has landed.
void break_endpoint(Ep* ep, int error) {
  if (ep->rdm || ep->broken) return;
  ep->broken = true;
  for (Write& write : world().wire) {
    if (write.from != ep->name || write.fault != 0) continue;
    write.fault = error;
    write.fault_lands = world().chance() % 2 == 0;
    write.delay = 0;
    write.held = false;
  }
  for (void* context : ep->receives) {
    world().contexts.erase(context);
    push_completion(ep, {context, FI_RECV, 0, FI_ECANCELED, 0});
  }
  ep->receives.clear();
  push_event(ep->eq, {FI_SHUTDOWN, &ep->fid.fid, nullptr, "", 0, 2});
}

bool knows(const Ep& target, uint64_t sender) {
  if (!target.rdm || world().rules.both_addresses == 0) return true;
  const auto& names = target.av->names;
  return std::find(names.begin(), names.end(), sender) != names.end();
}

void arrive(Ep* target, Write* write) {
  World& all = world();
  const uint64_t flags = FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA;
  // Without posted receives nobody may look at the context of an arrival.
  void* context = reinterpret_cast<void*>(uintptr_t{8});
  if (all.rules.posts_receives != 0) {
    context = target->receives.front();
    target->receives.pop_front();
    all.contexts.erase(context);
  }
  push_completion(target, {context, flags, write->data, 0, 0});
  ++all.counts["arrivals"];
}

bool is_page(const Write& write) { return write.has_data && write.data >> 20 != 0; }

// What the test has asked to go wrong with the next page write.
void apply_faults(Write* write) {
  Rules& rules = world().rules;
  if (!is_page(*write) || write->fault != 0) return;
  if (World::use(&rules.fail_next)) {
    write->fault = FI_EIO;
    write->fault_lands = rules.fail_lands != 0;
  } else if (World::use(&rules.lose_next)) {
    write->lost = true;
  }
}

// True when the write is done with and leaves the wire.
bool land(Write* write, Write* again) {
  World& all = world();
  if (!write->again) apply_faults(write);
  Ep* target = find_endpoint(write->to);
  const bool connected = target != nullptr && target->enabled && !target->broken &&
                         (target->rdm || target->connected) && knows(*target, write->from);
  Ep* from = find_endpoint(write->from);
  const int fault = write->fault;
  if (!connected || (fault != 0 && !write->fault_lands)) {
    if (!connected && !write->again) ++all.counts["unreachable"];
    complete(write, fault != 0 ? fault : FI_ECANCELED);
    if (from != nullptr && !write->again) break_endpoint(from, FI_ECANCELED);
    return true;
  }
  std::vector<uint8_t*> targets;
  for (const Segment& one : write->segments) targets.push_back(target_of(*target->domain, one));
  if (std::find(targets.begin(), targets.end(), nullptr) != targets.end()) {
    if (!write->again) ++all.counts["refused"];
    complete(write, FI_EACCES);
    if (from != nullptr && !write->again) break_endpoint(from, FI_ECANCELED);
    return true;
  }
  if (write->has_data && all.rules.posts_receives != 0 && target->receives.empty()) {
    ++all.counts["not_ready"];  // tried again without end, as real devices are told to
    return false;
  }
  if (write->torn && write->has_data) {  // the immediate first, the payload some time later
    arrive(target, write);
    write->has_data = false;
    write->delay = 20;
    return false;
  }
  move_bytes(*write, targets);
  if (write->again) return true;
  if (is_page(*write)) ++all.counts["landed_pages"];
  if (write->has_data) {
    arrive(target, write);
    const bool room = all.rules.posts_receives == 0 || !target->receives.empty();
    if (is_page(*write) && room && World::use(&all.rules.repeat_next)) arrive(target, write);
  }
  const bool forbidden = from == nullptr || (from->in_order && target->in_order);
  if (all.rules.writes_twice != 0 && !forbidden && all.roll(400)) {
    copy_payload(write);
    *again = *write;
    again->again = again->completed = true;
    again->delay = 30;
  }
  complete(write, fault);
  if (fault != 0 && from != nullptr) break_endpoint(from, FI_ECANCELED);
  return true;
}

bool moves_in(const Write& write, const Domain* domain) {
  if (write.held) return false;
  const Ep* to = find_endpoint(write.to);
  const Ep* from = find_endpoint(write.from);
  if (to == nullptr || to->domain == domain) return true;
  return world().rules.target_progress == 0 && from != nullptr && from->domain == domain;
}

// The next write to move: any that may, or the first of its sender where order is kept.
std::list<Write>::iterator choose(const Domain* domain) {
  World& all = world();
  std::vector<std::list<Write>::iterator> may;
  for (auto one = all.wire.begin(); one != all.wire.end() && may.size() < 64; ++one) {
    if (moves_in(*one, domain)) may.push_back(one);
  }
  if (may.empty()) return all.wire.end();
  const auto chosen = may[all.chance() % may.size()];
  if (all.rules.unordered != 0) return chosen;
  return *std::find_if(may.begin(), may.end(),
                       [&](const auto& one) { return one->from == chosen->from; });
}

Mr* local_region(const Domain& domain, void* descriptor, const iovec& source) {
  for (const auto& [key, mr] : domain.regions) {
    if (mr != descriptor) continue;
    const auto* begin = static_cast<const uint8_t*>(source.iov_base);
    const bool inside = begin >= mr->base && begin + source.iov_len <= mr->base + mr->length;
    return inside && (mr->access & FI_WRITE) != 0 ? mr : nullptr;
  }
  return nullptr;
}

// A segment of a message; memory of another device by the window that this one has on it.
Segment segment_of(const Domain& domain, const fi_msg_rma& message, size_t number) {
  const iovec& source = message.msg_iov[number];
  const fi_rma_iov& target = message.rma_iov[number];
  const auto* place = static_cast<const uint8_t*>(source.iov_base);
  void* descriptor = message.desc != nullptr ? message.desc[number] : nullptr;
  const Mr* mr = descriptor != nullptr ? local_region(domain, descriptor, source) : nullptr;
  if (mr == nullptr) return {place, source.iov_len, target.addr, target.key, nullptr};
  return {mr->data + (place - mr->base), source.iov_len, target.addr, target.key, mr->window};
}

// An errno of its late completion, 0 if all is well.
int check_message(const Ep& ep, const fi_msg_rma& message, uint64_t* bytes) {
  World& all = world();
  const auto limit = static_cast<size_t>(all.rules.segments);
  if (message.iov_count > limit || message.rma_iov_count > limit) {
    all.violation("a write has " + std::to_string(message.iov_count) + " segments");
    return FI_EFAULT;
  }
  uint64_t there = 0;
  for (size_t i = 0; i < message.iov_count; ++i) *bytes += message.msg_iov[i].iov_len;
  for (size_t i = 0; i < message.rma_iov_count; ++i) there += message.rma_iov[i].len;
  if (there != *bytes) all.violation("a write has two lengths");
  if (static_cast<int64_t>(*bytes) > all.rules.message_bytes) {
    all.violation("a write of " + std::to_string(*bytes) + " bytes");
    return FI_EFAULT;
  }
  if (all.rules.local_registration == 0) return 0;
  for (size_t i = 0; i < message.iov_count; ++i) {
    void* descriptor = message.desc != nullptr ? message.desc[i] : nullptr;
    if (local_region(*ep.domain, descriptor, message.msg_iov[i]) == nullptr) {
      all.violation("a write from memory that is not registered");
      return FI_EFAULT;
    }
  }
  return 0;
}

}  // namespace

ssize_t post_write(fid_ep* fid, const fi_msg_rma* message, uint64_t flags) {
  Ep* ep = reinterpret_cast<Ep*>(fid);
  const Entered entered(ep->domain);
  World& all = world();
  Rules& rules = all.rules;
  if (!ep->enabled || (!ep->rdm && !ep->connected)) return -FI_EOPBADSTATE;
  if (rules.again_always != 0 || rules.refuse_after_more > 1 || ep->flying >= rules.window ||
      all.roll(rules.again_permille)) {
    ++all.counts["again"];
    return -FI_EAGAIN;
  }
  if (ep->rdm && message->addr >= ep->av->names.size()) return -FI_EINVAL;
  Write write;
  write.from = ep->name;
  write.to = ep->rdm ? ep->av->names[message->addr] : ep->peer;
  write.context = message->context;
  write.has_data = (flags & FI_REMOTE_CQ_DATA) != 0;
  write.data = message->data & 0xffffffff;
  write.delay = static_cast<int>(all.chance() % 3);
  uint64_t bytes = 0;
  write.fault = check_message(*ep, *message, &bytes);
  if (ep->broken) write.fault = FI_ENOTCONN;
  for (size_t i = 0; i < message->iov_count; ++i) {
    write.segments.push_back(segment_of(*ep->domain, *message, i));
  }
  if (!all.contexts.emplace(message->context, ep->name).second) {
    all.violation("the context of an outstanding operation is used again");
  }
  ++ep->flying;
  all.counts["most_flying"] = std::max(all.counts["most_flying"], ep->flying);
  ++all.counts["writes"];
  const bool more = (flags & FI_MORE) != 0;
  if (!more) ring(*ep);
  if (is_page(write) && World::use(&all.rules.swallow_next)) return 0;
  const bool weak = rules.honours_delivery != 0 && (flags & FI_DELIVERY_COMPLETE) == 0;
  write.torn = FI_VERSION_LT(ep->domain->fabric->api, FI_VERSION(1, 18));
  if ((weak || write.torn) && write.fault == 0) {
    copy_payload(&write);
    complete(&write, 0);  // as soon as the bytes are out of the caller's hands
  }
  write.held = more && rules.holds_more != 0 && !ep->broken;
  if (more && rules.refuse_after_more == 1) rules.refuse_after_more = 2;
  all.wire.push_back(std::move(write));
  signal_fd(ep->cq->fd);
  const Ep* target = find_endpoint(all.wire.back().to);
  if (target != nullptr && target->cq != nullptr) signal_fd(target->cq->fd);
  return 0;
}

ssize_t post_receive(fid_ep* fid, void*, size_t, void*, fi_addr_t, void* context) {
  Ep* ep = reinterpret_cast<Ep*>(fid);
  const Entered entered(ep->domain);
  World& all = world();
  if (all.rules.refuse_receives != 0 || all.roll(all.rules.again_permille)) return -FI_EAGAIN;
  if (!all.contexts.emplace(context, ep->name).second) {
    all.violation("the context of an outstanding receive is used again");
  }
  ep->receives.push_back(context);
  return 0;
}

void progress(Domain* domain) {
  World& all = world();
  for (uint64_t moves = 1 + all.chance() % 6; moves > 0; --moves) {
    if (all.rules.hold != 0 && all.rules.land_next == 0) return;
    const auto one = choose(domain);
    if (one == all.wire.end()) return;
    if (one->delay > 0) {
      --one->delay;
      continue;
    }
    Write again;
    const bool done = land(&*one, &again);
    if (again.again) all.wire.push_back(std::move(again));
    if (!done) continue;
    all.wire.erase(one);
    if (all.rules.hold != 0) World::use(&all.rules.land_next);
  }
}

bool pending_for(const Domain* domain) {
  const auto& wire = world().wire;
  return std::any_of(wire.begin(), wire.end(),
                     [domain](const Write& one) { return moves_in(one, domain); });
}

void close_wire(Ep* ep) {
  World& all = world();
  const bool cancels = all.rules.cancels_at_close != 0;
  for (auto one = all.wire.begin(); one != all.wire.end();) {
    Write& write = *one;
    bool stays = true;
    if (write.from == ep->name) {
      // On its way already, or not: its sender hears only that it was cancelled.
      stays = write.completed || all.chance() % 2 == 0;
      if (stays) copy_payload(&write);
      if (!write.completed && cancels && !write.lost) {
        push_completion(ep, {write.context, FI_RMA | FI_WRITE, 0, FI_ECANCELED, 0});
      }
      write.completed = true;
      write.held = false;
    } else if (write.to == ep->name) {
      stays = false;
      complete(&write, FI_ECANCELED);
      if (Ep* from = find_endpoint(write.from)) break_endpoint(from, FI_ECANCELED);
    }
    one = stays ? std::next(one) : all.wire.erase(one);
  }
  for (void* context : ep->receives) {
    if (cancels) push_completion(ep, {context, FI_RECV, 0, FI_ECANCELED, 0});
  }
  for (auto one = all.contexts.begin(); one != all.contexts.end();) {
    one = one->second == ep->name ? all.contexts.erase(one) : std::next(one);
  }
  if (cancels || ep->cq == nullptr) return;
  auto& entries = ep->cq->entries;
  entries.erase(std::remove_if(entries.begin(), entries.end(),
                               [ep](const Completion& one) { return one.of == ep->name; }),
                entries.end());
}

}  // namespace fake
