#include "fabric.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cmath>
#include <future>
#include <limits>

#include "compat.hpp"

namespace pdnode {

namespace {

constexpr size_t kMinTokenBytes = 16;
constexpr size_t kMaxTokenBytes = 46;  // verbs carries 55 bytes of connection data, 9 are ours
constexpr size_t kMaxSessions = 1024;
constexpr double kMaxDeadlineS = 3600;
constexpr double kMinSilenceS = 1;
constexpr uint32_t kMaxWindow = 65'536;

[[noreturn]] void refuse(const std::string& text) { throw FabricError(text); }

void require(const Error& error) {
  if (error) throw FabricError(error.text());
}

void require(bool condition, const std::string& text) {
  if (!condition) refuse(text);
}

std::string quoted(const char* what, int64_t number) {
  return std::string(what) + " " + std::to_string(number);
}

}  // namespace

Fabric::Fabric(const std::string& library, const std::string& provider, const std::string& poll,
               uint32_t window, double silence_s, bool device_memory) {
  const Provider* row = find_provider(provider);
  require(row != nullptr, "provider: '" + provider + "' is not one of " + provider_names());
  require(poll == "adaptive" || poll == "busy",
          "poll: '" + poll + "' is not one of adaptive, busy");
  require(silence_s >= kMinSilenceS && silence_s <= kMaxDeadlineS,
          "silence_s: 1 to 3600 s");
  require(window <= kMaxWindow, "window: at most " + std::to_string(kMaxWindow) + " writes");
  const Library* loaded = nullptr;
  require(Library::load(library, &loaded));
  require(!device_memory || row->pins,
          "device_memory: only verbs and efa reach the memory of a device");
  require(!device_memory || FI_VERSION_GE(loaded->api_version(), kDeviceApiVersion),
          "device_memory: " + library + " is libfabric " + loaded->version() +
              "; 1.20 or newer is needed (dma-buf)");
  require(query(*loaded, *row, "", "", "", device_memory, &info_));
  hub_ = std::make_unique<Hub>(*loaded, *row, poll == "busy", window,
                               static_cast<int64_t>(silence_s * 1e9), device_memory);
}

std::vector<Device> Fabric::devices() const {
  std::vector<Device> found;
  require(list_devices(hub_->library, hub_->provider, &found));
  return found;
}

Fabric::~Fabric() { static_cast<void>(close()); }

Error Fabric::close() {
  if (closed_) return Error();
  closed_ = true;
  for (auto& group : groups_) group->request_stop();
  for (auto& group : groups_) group->join();
  Error error;
  for (auto& group : groups_) {
    const Error found = group->close();
    if (!error) error = found;
  }
  hub_->events.close();
  sessions_.clear();
  for (auto& [number, transfer] : transfers_) transfer->programs.clear();
  transfers_.clear();
  regions_.clear();
  return error;
}

void Fabric::check_open() const { require(!closed_, "the fabric is closed"); }

int Fabric::event_fd() const {
  check_open();
  return hub_->events.fd();
}

std::vector<Event> Fabric::take_events(size_t most) {
  std::vector<Event> events = hub_->events.take(most);
  for (const Event& event : events) {
    // The whole session: nothing is left of it.
    if (event.kind != EventKind::kFenced || event.pair.first >= 0) continue;
    const auto found = sessions_.find(event.session);
    if (found != sessions_.end() && found->second.fencing) sessions_.erase(found);
  }
  return events;
}

int Fabric::add_group(const std::vector<std::pair<std::string, std::string>>& nics, int cpu) {
  check_open();
  require(!nics.empty(), "nics: a group needs at least one");
  require(counters_.empty(), "groups: they are added before the counters that they watch");
  require(groups_.size() < kMaxGroups, "groups: at most " + std::to_string(kMaxGroups));
  require(nics_.size() + nics.size() <= kMaxNics, "nics: at most " + std::to_string(kMaxNics));
  const int number = static_cast<int>(groups_.size());
  auto added = std::make_unique<Group>(*hub_, number);
  require(added->start(nics, static_cast<int>(nics_.size()), cpu));
  for (const auto& nic : added->nics) {
    nics_.push_back(nic.get());
    nic_groups_.push_back(number);
  }
  hub_->groups[number].store(added.get(), std::memory_order_release);
  groups_.push_back(std::move(added));
  return number;
}

int Fabric::group_of(int nic) const {
  require(nic >= 0 && static_cast<size_t>(nic) < nics_.size(),
          quoted("nic", nic) + " does not exist; there are " + std::to_string(nics_.size()));
  return nic_groups_[static_cast<size_t>(nic)];
}

Group& Fabric::group(int number) const {
  require(number >= 0 && static_cast<size_t>(number) < groups_.size(),
          quoted("group", number) + " does not exist; there are " +
              std::to_string(groups_.size()));
  return *groups_[static_cast<size_t>(number)];
}

int Fabric::wake_fd(int number) const {
  check_open();
  return group(number).wake_fd();
}

// Start-up calls alone wait for a group's thread.
Error Fabric::run_and_wait(int number, std::function<Error(Group&)> work) const {
  auto done = std::make_shared<std::promise<Error>>();
  std::future<Error> result = done->get_future();
  group(number).post([done, work = std::move(work)](Group& on) { done->set_value(work(on)); });
  return result.get();
}

int Fabric::listen(int nic, const std::string& address, int port) {
  check_open();
  require(hub_->provider.endpoint == FI_EP_MSG,
          std::string("listen: provider ") + hub_->provider.name + " has no listening port");
  require(port >= 0 && port <= 65535, "port: " + std::to_string(port) + " is not 0 to 65535");
  int bound = 0;
  require(run_and_wait(group_of(nic), [&](Group& on) {
    return on.listen(nic, address, port, &bound);
  }));
  return bound;
}

void Fabric::unlisten(int nic) {
  check_open();
  require(run_and_wait(group_of(nic), [nic](Group& on) { return on.unlisten(nic); }));
}

std::string Fabric::endpoint_name(int64_t number, int nic) {
  Session& session = find_session(number);
  const std::lock_guard<std::mutex> lock(session.shared->mutex);
  const auto found = session.shared->endpoint_names.find(nic);
  require(found != session.shared->endpoint_names.end(),
          quoted("session", number) + " has no endpoint on " + quoted("nic", nic));
  return found->second;
}

Fabric::NewRegion Fabric::begin_region(int number, int fd, uint64_t size, uint64_t page_bytes) {
  check_open();
  std::unique_ptr<Mapping> memory;
  require(Mapping::open(fd, size, "region", &memory));
  return begin(number, std::move(memory), Fd(), 0, page_bytes);
}

Fabric::NewRegion Fabric::begin_device_region(int number, int dmabuf, uint64_t address,
                                              uint64_t size, uint64_t page_bytes, int device) {
  check_open();
  require(hub_->device_memory, "device_memory: the fabric was opened without it");
  require(address != 0, "address: 0 is none");
  require(device >= 0, quoted("device", device) + " is none");
  Fd copy(fcntl(dmabuf, F_DUPFD_CLOEXEC, 0));
  if (copy.get() < 0) refuse(errno_text("dmabuf", errno));
  return begin(number, Mapping::of_device(reinterpret_cast<uint8_t*>(address), size),
               std::move(copy), device, page_bytes);
}

Fabric::NewRegion Fabric::begin(int number, std::unique_ptr<Mapping> memory, Fd dmabuf,
                                int device, uint64_t page_bytes) {
  Group& on = group(number);
  const uint64_t size = memory->size();
  require(page_bytes > 0 && size > 0 && size % page_bytes == 0,
          "size: " + std::to_string(size) + " is not a multiple of page_bytes " +
              std::to_string(page_bytes));
  auto region = std::make_shared<Region>();
  region->number = next_region_++;
  region->group = number;
  region->page_bytes = page_bytes;
  region->memory = std::move(memory);
  region->dmabuf = std::move(dmabuf);
  region->device = static_cast<uint64_t>(device);
  const Nic& nic = *on.nics.front();
  auto done = std::make_shared<std::promise<Error>>();
  NewRegion added{region, done->get_future()};
  if (nic.limits.local_registration || !nic.provider.session_registration) {
    on.post([region, done](Group& there) {
      there.add_region(region, [done](Error error) { done->set_value(std::move(error)); });
    });
  } else {
    done->set_value(Error());
  }
  return added;
}

int Fabric::keep_region(NewRegion added) {
  added.done.wait();
  check_open();  // closed meanwhile, it never says how it went
  require(added.done.get());
  regions_[added.region->number] = added.region;
  return added.region->number;
}

void Fabric::remove_region(int number) {
  check_open();
  const auto found = regions_.find(number);
  require(found != regions_.end(), quoted("region", number) + " does not exist");
  for (const auto& [id, session] : sessions_) {
    const auto& list = session.writable;
    require(std::find(list.begin(), list.end(), number) == list.end(),
            quoted("region", number) + " is open to " + quoted("session", id));
  }
  for (const auto& [id, transfer] : transfers_) {
    require(transfer->ended.load() || transfer->regions.count(number) == 0,
            quoted("region", number) + " is the source of " + quoted("transfer", id));
  }
  // The commands hold the mapping until its registrations are closed.
  for (auto& one : groups_) {
    one->post([region = found->second](Group& on) { on.remove_region(region->number); });
  }
  regions_.erase(found);
}

std::shared_ptr<const Region> Fabric::region(int number) const {
  check_open();
  const auto found = regions_.find(number);
  require(found != regions_.end(), quoted("region", number) + " does not exist");
  return found->second;
}

int Fabric::add_counter(int page_fd) {
  check_open();
  std::unique_ptr<Mapping> memory;
  require(Mapping::open(page_fd, kCounterPageBytes, "counter page", &memory));
  auto page = std::make_shared<CounterPage>(std::move(memory));
  const int number = next_counter_++;
  for (auto& one : groups_) {
    one->post([number, page](Group& on) { on.add_counter(number, page); });
  }
  counters_.insert(number);
  return number;
}

void Fabric::remove_counter(int number) {
  check_open();
  require(counters_.erase(number) == 1, quoted("counter", number) + " does not exist");
  for (auto& one : groups_) {
    one->post([number](Group& on) { on.remove_counter(number); });
  }
}

Fabric::Session& Fabric::find_session(int64_t number) {
  check_open();
  const auto found = sessions_.find(number);
  require(found != sessions_.end(), quoted("session", number) + " is not open");
  return found->second;
}

void Fabric::open_session(int64_t number, const std::vector<int>& nics,
                          const std::vector<int>& writable, const std::string& token) {
  check_open();
  require(number >= 0, "session: " + std::to_string(number) + " is negative");
  require(!nics.empty(), "nics: a session needs at least one");
  require(token.size() >= kMinTokenBytes && token.size() <= kMaxTokenBytes,
          "token: " + std::to_string(token.size()) + " bytes, 16 to 46 are allowed");
  std::map<int, std::vector<int>> by_group;
  for (const int nic : nics) by_group[group_of(nic)].push_back(nic);
  for (const int region : writable) {
    require(regions_.count(region) != 0, quoted("region", region) + " does not exist");
  }
  const bool again = sessions_.count(number) != 0;
  require(again || sessions_.size() < kMaxSessions,
          "sessions: at most " + std::to_string(kMaxSessions));
  Session& session = sessions_[number];
  require(!session.fencing, quoted("session", number) + " is being fenced");
  if (!again) session.shared = std::make_shared<SessionShared>(number, token);
  require(session.shared->token == token,
          quoted("session", number) + " is open with another token");
  session.writable = writable;
  session.shared->opening.fetch_add(static_cast<int>(nics.size()));
  for (const auto& [group_number, on_nics] : by_group) {
    session.groups.insert(group_number);
    session.nics.insert(on_nics.begin(), on_nics.end());
    group(group_number)
        .post([shared = session.shared, on_nics,
               regions = writable_on(session, group_number)](Group& on) {
          on.open_session(shared, on_nics, regions);
        });
  }
}

std::vector<std::shared_ptr<Region>> Fabric::writable_on(const Session& session,
                                                         int number) const {
  std::vector<std::shared_ptr<Region>> found;
  const auto carried = session.carried.find(number);
  for (const int one : session.writable) {
    const auto& region = regions_.at(one);
    const bool lent = carried != session.carried.end() && carried->second.count(one) != 0;
    if (region->group == number || lent) found.push_back(region);
  }
  return found;
}

void Fabric::carry(int64_t number, int region, int group_number) {
  Session& session = find_session(number);
  require(!session.fencing, quoted("session", number) + " is being fenced");
  const auto& list = session.writable;
  require(std::find(list.begin(), list.end(), region) != list.end(),
          quoted("region", region) + " is not open to " + quoted("session", number));
  require(session.groups.count(group_number) != 0,
          quoted("session", number) + " has no NIC of " + quoted("group", group_number));
  const auto& memory = regions_.at(region);
  if (memory->group != group_number) session.carried[group_number].insert(region);
  group(group_number).post(
      [shared = session.shared, memory](Group& on) { on.carry(shared, memory); });
}

std::vector<Descriptor> Fabric::descriptors(int64_t number) {
  Session& session = find_session(number);
  require(session.shared->opened.load(), quoted("session", number) + " has not said `opened` yet");
  const std::lock_guard<std::mutex> lock(session.shared->mutex);
  return session.shared->descriptors;
}

void Fabric::connect(int64_t number, Pair pair, const std::string& endpoint, double deadline_s) {
  Session& session = find_session(number);
  require(session.nics.count(pair.first) != 0,
          quoted("session", number) + " is not open on " + quoted("nic", pair.first));
  require(pair.second >= 0 && pair.second < kMaxNics,
          "pair: remote NIC " + std::to_string(pair.second) + " is not 0 to 63");
  require(std::isfinite(deadline_s) && deadline_s > 0 && deadline_s <= kMaxDeadlineS,
          "deadline_s: " + std::to_string(deadline_s) + " is not above 0 and at most 3600");
  std::vector<uint8_t> address(endpoint.begin(), endpoint.end());
  if (hub_->provider.endpoint == FI_EP_MSG) require(parse_endpoint(endpoint, &address));
  const auto patience = static_cast<int64_t>(deadline_s * 1e9);
  group(group_of(pair.first)).post([number, pair, address, patience](Group& on) {
    on.connect(number, pair, address, patience);
  });
}

void Fabric::set_remote(int64_t number, RemoteTable table) {
  Session& session = find_session(number);
  for (auto& [rank, region] : table) {
    for (auto& [nic, pieces] : region.pieces) {
      std::sort(pieces.begin(), pieces.end(), [](const RemotePiece& a, const RemotePiece& b) {
        return a.offset < b.offset;
      });
      uint64_t end = 0;
      for (const RemotePiece& piece : pieces) {
        const std::string where = quoted("descriptor of rank", rank) + ", " + quoted("nic", nic);
        require(nic >= 0 && nic < kMaxNics, where + ": the NIC number is not 0 to 63");
        require(piece.length > 0 && piece.offset == end, where + ": pieces leave gaps or overlap");
        require(piece.length <= std::numeric_limits<uint64_t>::max() - piece.base &&
                    piece.length < (uint64_t{1} << 48) && end < (uint64_t{1} << 48),
                where + ": too long");
        end += piece.length;
      }
      require(region.size == 0 || region.size == end,
              quoted("descriptor of rank", rank) + ": its NICs disagree on the length");
      region.size = end;
    }
  }
  session.remote = std::make_shared<const RemoteTable>(std::move(table));
  for (const int one : session.groups) {
    group(one).post([number, remote = session.remote](Group& on) {
      on.set_remote(number, remote);
    });
  }
}

void Fabric::probe(int64_t number, bool answer) {
  Session& session = find_session(number);
  require(session.remote != nullptr, quoted("session", number) + " has no descriptors of its peer");
  for (const int one : session.groups) {
    group(one).post([number, answer](Group& on) { on.probe(number, answer); });
  }
}

void Fabric::fence(int64_t number, std::optional<Pair> pair) {
  check_open();
  const auto found = sessions_.find(number);
  const Pair which = pair.value_or(Pair{-1, -1});
  std::set<int> concerned;
  if (found != sessions_.end() && !pair) {
    concerned = found->second.groups;
    found->second.fencing = true;
    hub_->slots.kill(number);
  } else if (found != sessions_.end() && found->second.nics.count(pair->first) != 0) {
    concerned = {group_of(pair->first)};
  }
  auto ticket = std::make_shared<FenceTicket>(number, which, static_cast<int>(concerned.size()));
  for (const int one : concerned) {
    group(one).post([ticket](Group& on) { on.fence(ticket); });
  }
  if (concerned.empty()) {
    Event event;
    event.kind = EventKind::kFenced;
    event.session = number;
    event.pair = which;
    hub_->events.push(std::move(event));
  }
  if (pair || concerned.empty()) return;
  std::vector<std::shared_ptr<Transfer>> orphans;
  for (const auto& [id, transfer] : transfers_) {
    if (transfer->session == number && !transfer->ended.load()) orphans.push_back(transfer);
  }
  if (orphans.empty()) return;
  group(*concerned.begin()).post([orphans](Group& on) { on.fail_all(orphans); });
}

void Fabric::arm(int slot, int generation, int64_t number, int64_t expected) {
  const Session& session = find_session(number);
  require(slot >= 1 && slot < kSlots, quoted("slot", slot) + " is not 1 to 4095");
  require(generation >= 0 && generation <= 255,
          quoted("generation", generation) + " is not 0 to 255");
  require(expected >= 0 && expected < (int64_t{1} << 39),
          "expected: " + std::to_string(expected) + " is not 0 to 2^39");
  require(!hub_->slots.armed(slot), quoted("slot", slot) + " is armed already");
  const SlotOutcome outcome = hub_->slots.arm(slot, generation, number,
                                              static_cast<uint64_t>(expected), session.fencing);
  Event event;
  event.session = number;
  event.slot = slot;
  event.generation = generation;
  event.count = static_cast<int64_t>(outcome.count);
  if (outcome.reached) {
    event.kind = EventKind::kReached;
    hub_->events.push(event);
  }
  if (outcome.overshoot) {
    hub_->counters.overshoots.fetch_add(1);
    event.kind = EventKind::kOvershoot;
    hub_->events.push(event);
  }
}

void Fabric::disarm(int slot) {
  check_open();
  require(slot >= 1 && slot < kSlots, quoted("slot", slot) + " is not 1 to 4095");
  require(hub_->slots.disarm(slot), quoted("slot", slot) + " is not armed");
}

int64_t Fabric::counted(int slot) const {
  require(slot >= 1 && slot < kSlots, quoted("slot", slot) + " is not 1 to 4095");
  return static_cast<int64_t>(hub_->slots.counted(slot));
}

}  // namespace pdnode
