#include "session.hpp"

#include <algorithm>
#include <cassert>

namespace pdnode {

const RemotePiece* RemoteRegion::find(const std::vector<RemotePiece>& of_nic,
                                      uint64_t offset) const {
  auto after = std::upper_bound(
      of_nic.begin(), of_nic.end(), offset,
      [](uint64_t wanted, const RemotePiece& piece) { return wanted < piece.offset; });
  if (after == of_nic.begin()) return nullptr;
  const RemotePiece& piece = *--after;
  return offset - piece.offset < piece.length ? &piece : nullptr;
}

Op* OpPool::take() {
  if (free_ == nullptr) {
    chunks_.push_back(std::make_unique<Op[]>(kChunk));
    allocated_->add(kChunk);
    for (size_t i = 0; i < kChunk; ++i) give(&chunks_.back()[i]);
  }
  Op* op = free_;
  free_ = op->next;
  op->next = nullptr;
  return op;
}

void OpPool::give(Op* op) {
  op->kind = Op::Kind::kFree;
  op->connection = nullptr;
  op->receiver = nullptr;
  op->program = nullptr;
  op->condemned = nullptr;
  op->previous = nullptr;
  op->next = free_;
  free_ = op;
}

namespace {

void push(Op** list, Op* op) {
  op->previous = nullptr;
  op->next = *list;
  if (*list != nullptr) (*list)->previous = op;
  *list = op;
}

void remove(Op** list, Op* op) {
  (op->previous != nullptr ? op->previous->next : *list) = op->next;
  if (op->next != nullptr) op->next->previous = op->previous;
  op->previous = op->next = nullptr;
}

}  // namespace

void Receiver::link(Op* op) {
  op->receiver = this;
  push(&ops, op);
}

void Receiver::unlink(Op* op) {
  assert(op->receiver == this);
  remove(&ops, op);
  op->receiver = nullptr;
}

void Connection::link(Op* op) {
  op->connection = this;
  if (ops == nullptr) oldest = op;
  push(&ops, op);
  ++writes;
  bytes += op->bytes;
  if (writes >= nic->limits.window_writes || bytes >= kWindowBytes) full = true;
}

void Connection::unlink(Op* op) {
  assert(op->connection == this);
  if (op == oldest) oldest = op->previous;
  remove(&ops, op);
  op->connection = nullptr;
  --writes;
  bytes -= op->bytes;
  if (writes <= nic->limits.window_writes / 2 && bytes < kWindowBytes) full = false;
}

Connection* SessionPart::find(Pair pair) const {
  for (const auto& connection : connections) {
    if (connection->pair == pair) return connection.get();
  }
  return nullptr;
}

}  // namespace pdnode
