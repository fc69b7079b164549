// A transfer: what pushes one request's pages. It may have programs in several groups; Python
// and their threads share it. A program belongs to one group's thread, until it has ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "events.hpp"
#include "memory.hpp"

namespace pdnode {

struct SessionPart;
struct Transfer;

struct Span {
  uint64_t source, destination, count;
};

// One row of the record: what became of one layer of one program.
struct LayerRecord {
  int64_t raised_ns = 0;  // when our thread saw the counter, or took a program that was due
  int64_t posted_ns = 0;  // entry of the first fi_writemsg
  int64_t done_ns = 0;    // the last completion so far
  uint64_t bytes = 0;
  uint64_t writes = 0;
};

struct Cursor {
  uint32_t layer = 0;
  size_t span = 0;
  uint64_t page = 0;  // within the span
};

struct Program {
  // Set by Python before the group sees it.
  std::shared_ptr<Transfer> transfer;
  std::shared_ptr<Region> region;
  int counter = -1;
  uint64_t base = 0;
  uint32_t layers = 0;
  uint64_t source_layer_stride = 0, source_page_stride = 0, source_offset = 0;
  int remote_rank = 0;
  uint64_t remote_layer_stride = 0, remote_page_stride = 0, remote_offset = 0;
  uint64_t length = 0;
  bool whole_page = false;
  std::vector<Span> spans;

  // The group's thread only. Python reads the records after `drained` or `settled`.
  SessionPart* part = nullptr;
  std::vector<LayerRecord> records;
  uint32_t due = 0;  // layers that may be posted
  Cursor cursor;     // what is posted next
  uint32_t outstanding = 0;
  bool queued = false;  // in its session's ready queue, or in the group's of urgent ones
  bool urgent = false;  // in the latter
  bool ended = false;
};

struct Transfer {
  Transfer(int64_t id_, int64_t session_, uint32_t immediate_, std::optional<Pair> only_)
      : id(id_), session(session_), immediate(immediate_), only(only_) {}

  const int64_t id;
  const int64_t session;
  const uint32_t immediate;  // with weight 0
  const std::optional<Pair> only;  // the one connection it may use; none: all

  // Python's thread only.
  std::vector<std::shared_ptr<Program>> programs;
  std::set<int> groups, regions;
  bool finished = false;

  // One for Python until finish, stop or failure; one for each program until it has nothing
  // outstanding and will post nothing; one while `failed` is being said. At 0 the transfer ends.
  std::atomic<int64_t> units{1};
  std::atomic<bool> token_dropped{false};
  std::atomic<bool> stopped{false};
  std::atomic<bool> failed{false};
  std::atomic<bool> ended{false};

  // Nothing more may be posted.
  bool halted() const {
    return failed.load(std::memory_order_acquire) || stopped.load(std::memory_order_acquire);
  }

  // A write over `pair` (−1, −1: none) failed. True for the first failure that counts: the caller
  // then owes the event, and holds one unit until it has said it.
  bool note_failure(Pair pair, const std::string& why);
  std::string failure_text();
  std::vector<Pair> failed_pairs();

  bool add_unit();  // false: the transfer has ended
  // Gives up a unit, or Python's; the last one says `drained` or `settled`.
  void drop_unit(EventQueue* events);
  void drop_token(EventQueue* events);

 private:
  std::mutex mutex_;  // rare: failures
  std::set<Pair> failed_pairs_;
  std::string text_;
};

}  // namespace pdnode
