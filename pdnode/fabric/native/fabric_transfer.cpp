// The sender's side of the engine: transfers, and the figures that anyone may read.

#include <algorithm>

#include "fabric.hpp"

namespace pdnode {

namespace {

constexpr size_t kMaxTransfers = 65536;
constexpr int64_t kMaxLayers = 65536;

void require(bool condition, const std::string& text) {
  if (!condition) throw FabricError(text);
}

// Highest byte that a program touches on one side, or nothing if the sum does not fit.
bool end_of(uint64_t layers, int64_t layer_stride, uint64_t last_page, int64_t page_stride,
            int64_t offset, int64_t length, uint64_t* end) {
  if (layer_stride < 0 || page_stride < 0 || offset < 0 || length <= 0) return false;
  unsigned __int128 sum = static_cast<unsigned __int128>(layers - 1) *
                          static_cast<uint64_t>(layer_stride);
  sum += static_cast<unsigned __int128>(last_page) * static_cast<uint64_t>(page_stride);
  sum += static_cast<uint64_t>(offset);
  sum += static_cast<uint64_t>(length);
  if (sum >> 62 != 0) return false;
  *end = static_cast<uint64_t>(sum);
  return true;
}

}  // namespace

std::shared_ptr<Transfer> Fabric::find_transfer(int64_t number) const {
  check_open();
  const auto found = transfers_.find(number);
  require(found != transfers_.end(), "transfer " + std::to_string(number) + " is not open");
  return found->second;
}

void Fabric::open_transfer(int64_t number, int64_t session, int64_t immediate,
                           std::optional<Pair> only) {
  require(!find_session(session).fencing,
          "session " + std::to_string(session) + " is being fenced");
  require(transfers_.count(number) == 0, "transfer " + std::to_string(number) + " is open already");
  require(transfers_.size() < kMaxTransfers,
          "transfers: at most " + std::to_string(kMaxTransfers));
  require(immediate >= (int64_t{1} << 20) && immediate < (int64_t{1} << 32) &&
              (immediate & 0xfff) == 0,
          "immediate: " + std::to_string(immediate) +
              " is not slot << 20 | generation << 12 with a slot of 1 to 4095");
  transfers_[number] =
      std::make_shared<Transfer>(number, session, static_cast<uint32_t>(immediate), only);
}

void Fabric::check_bounds(const SubmitArguments& a, const Region& region, const Session& session,
                          const std::vector<Span>& spans) const {
  require(session.remote != nullptr, "remote_rank: the session has no descriptors of its peer");
  const auto remote = session.remote->find(a.remote_rank);
  require(remote != session.remote->end() && a.remote_rank != kScratch,
          "remote_rank: the peer has described no rank " + std::to_string(a.remote_rank));
  require(a.length > 0 && static_cast<uint64_t>(a.length) <= info_->ep_attr->max_msg_size,
          "length: " + std::to_string(a.length) + " is not 1 to the provider's " +
              std::to_string(info_->ep_attr->max_msg_size));
  require(!a.whole_page || (a.length == a.source_page_stride && a.length == a.remote_page_stride),
          "whole_page: the length is not the page stride of both sides");
  if (spans.empty() || a.layers == 0) return;
  uint64_t source_page = 0, remote_page = 0;
  for (const Span& span : spans) {
    require(span.count > 0 && span.count <= (uint64_t{1} << 40) &&
                span.source <= (uint64_t{1} << 40) && span.destination <= (uint64_t{1} << 40),
            "spans: a page number or count is out of range");
    source_page = std::max(source_page, span.source + span.count - 1);
    remote_page = std::max(remote_page, span.destination + span.count - 1);
  }
  const auto layers = static_cast<uint64_t>(a.layers);
  uint64_t end = 0;
  require(end_of(layers, a.source_layer_stride, source_page, a.source_page_stride,
                 a.source_offset, a.length, &end) &&
              end <= region.size(),
          "spans: source page " + std::to_string(source_page) + " is outside of region " +
              std::to_string(region.number) + " of " + std::to_string(region.size()) + " bytes");
  require(end_of(layers, a.remote_layer_stride, remote_page, a.remote_page_stride,
                 a.remote_offset, a.length, &end) &&
              end <= remote->second.size,
          "spans: destination page " + std::to_string(remote_page) +
              " is outside of the peer's rank " + std::to_string(a.remote_rank) + " of " +
              std::to_string(remote->second.size) + " bytes");
}

void Fabric::submit(const SubmitArguments& a, std::vector<Span> spans) {
  const std::shared_ptr<Transfer> transfer = find_transfer(a.transfer);
  require(!transfer->finished, "transfer " + std::to_string(a.transfer) + " is finished");
  const auto region = regions_.find(a.region);
  require(region != regions_.end(), "region " + std::to_string(a.region) + " does not exist");
  require(a.counter == -1 || counters_.count(a.counter) != 0,
          "counter " + std::to_string(a.counter) + " does not exist");
  require(a.group >= -1 && a.group < static_cast<int>(groups_.size()),
          "group " + std::to_string(a.group) + " does not exist; there are " +
              std::to_string(groups_.size()));
  require(a.layers >= 0 && a.layers <= kMaxLayers,
          "layers: " + std::to_string(a.layers) + " is not 0 to " + std::to_string(kMaxLayers));
  // A session that is gone, or a failure that Python has not heard of yet, is no error here: the
  // transfer's own events say it.
  const auto session = sessions_.find(transfer->session);
  if (session == sessions_.end() || transfer->halted()) return;
  check_bounds(a, *region->second, session->second, spans);
  if (!transfer->add_unit()) return;
  auto program = std::make_shared<Program>();
  program->transfer = transfer;
  program->region = region->second;
  program->counter = a.counter;
  program->base = a.base;
  program->layers = static_cast<uint32_t>(a.layers);
  program->source_layer_stride = static_cast<uint64_t>(a.source_layer_stride);
  program->source_page_stride = static_cast<uint64_t>(a.source_page_stride);
  program->source_offset = static_cast<uint64_t>(a.source_offset);
  program->remote_rank = a.remote_rank;
  program->remote_layer_stride = static_cast<uint64_t>(a.remote_layer_stride);
  program->remote_page_stride = static_cast<uint64_t>(a.remote_page_stride);
  program->remote_offset = static_cast<uint64_t>(a.remote_offset);
  program->length = static_cast<uint64_t>(a.length);
  program->whole_page = a.whole_page;
  program->spans = std::move(spans);
  transfer->programs.push_back(program);
  const int number = a.group >= 0 ? a.group : region->second->group;
  transfer->groups.insert(number);
  transfer->regions.insert(a.region);
  group(number).post([program](Group& on) { on.submit(program); });
}

void Fabric::finish(int64_t number) {
  const std::shared_ptr<Transfer> transfer = find_transfer(number);
  transfer->finished = true;
  transfer->drop_token(&hub_->events);
}

void Fabric::stop(int64_t number) {
  const std::shared_ptr<Transfer> transfer = find_transfer(number);
  transfer->stopped.store(true, std::memory_order_release);
  for (const int one : transfer->groups) {
    group(one).post([transfer](Group& on) { on.halt(transfer); });
  }
  transfer->drop_token(&hub_->events);
}

std::vector<RecordRow> Fabric::close_transfer(int64_t number) {
  const std::shared_ptr<Transfer> transfer = find_transfer(number);
  require(transfer->ended.load(std::memory_order_acquire),
          "transfer " + std::to_string(number) + " has neither drained nor settled");
  std::vector<RecordRow> rows;
  for (size_t batch = 0; batch < transfer->programs.size(); ++batch) {
    const auto& records = transfer->programs[batch]->records;
    for (size_t layer = 0; layer < records.size(); ++layer) {
      const LayerRecord& record = records[layer];
      rows.emplace_back(static_cast<int>(batch), static_cast<int>(layer), record.raised_ns,
                        record.posted_ns, record.done_ns, record.bytes, record.writes);
    }
  }
  transfer->programs.clear();  // they own the transfer in turn
  transfers_.erase(number);
  return rows;
}

std::vector<std::pair<const char*, uint64_t>> Fabric::statistics() const {
  uint64_t turns = 0, wakeups = 0, units = 0, contexts = 0;
  uint64_t posted[3] = {}, flying[3] = {};  // bytes, writes, pages
  for (const auto& one : groups_) {
    turns += one->turns.get();
    wakeups += one->wakeups.get();
    contexts += one->contexts.get();
  }
  constexpr Counter Volume::*kParts[] = {&Volume::bytes, &Volume::writes, &Volume::pages};
  for (const Nic* nic : nics_) {
    units += nic->flow.received_units.get();
    for (size_t i = 0; i < 3; ++i) {
      // What came back is read first: the difference is never negative.
      const uint64_t back =
          (nic->flow.done.*kParts[i]).get() + (nic->flow.failed.*kParts[i]).get();
      const uint64_t sent = (nic->flow.posted.*kParts[i]).get();
      posted[i] += sent;
      flying[i] += sent > back ? sent - back : 0;
    }
  }
  const SharedCounters& counters = hub_->counters;
  const int64_t connections = counters.connections.load();
  return {{"turns", turns},
          {"wakeups", wakeups},
          {"contexts", contexts},
          {"late_immediates", counters.late_immediates.load()},
          {"early_immediates", counters.early_immediates.load()},
          {"overshoots", counters.overshoots.load()},
          {"rejected_connections", counters.rejected_connections.load()},
          {"registrations", counters.registrations.load()},
          {"posted_bytes", posted[0]},
          {"posted_writes", posted[1]},
          {"posted_pages", posted[2]},
          {"received_units", units},
          {"bytes", flying[0]},
          {"writes", flying[1]},
          {"pages", flying[2]},
          {"sessions", sessions_.size()},
          {"connections", static_cast<uint64_t>(std::max<int64_t>(0, connections))},
          {"transfers", transfers_.size()}};
}

std::vector<uint64_t> Fabric::turns() const {
  std::vector<uint64_t> found;
  for (const auto& one : groups_) found.push_back(one->turns.get());
  return found;
}

std::vector<Fabric::PeerRow> Fabric::peers() const {
  std::vector<PeerRow> rows;
  for (const auto& [id, session] : sessions_) {
    for (const PairFlow& pair : session.shared->flows.entries) {
      if (pair.valid.load(std::memory_order_acquire)) rows.push_back({id, &pair});
    }
  }
  return rows;
}

}  // namespace pdnode
