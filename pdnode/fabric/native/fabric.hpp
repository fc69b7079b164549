// The transfer engine as Python sees it (pdnode/fabric/_native.pyi says what each call promises).
// Python calls, one thread at a time (its lock): what is asked for is checked, and queued to the
// groups.
#pragma once

#include <future>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "digest.hpp"
#include "group.hpp"

namespace pdnode {

// Thrown to Python only, never across threads.
class FabricError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct SubmitArguments {
  int64_t transfer = 0;
  int counter = -1;
  uint64_t base = 0;
  int64_t layers = 0;
  int region = -1;
  int64_t source_layer_stride = 0, source_page_stride = 0, source_offset = 0;
  int remote_rank = 0;
  int64_t remote_layer_stride = 0, remote_page_stride = 0, remote_offset = 0;
  int64_t length = 0;
  bool whole_page = false;
  int group = -1;  // −1: that of the region
};

using RecordRow = std::tuple<int, int, int64_t, int64_t, int64_t, uint64_t, uint64_t>;

class Fabric {
 public:
  // `window`: most writes in flight per connection, if below the provider's; 0: no bound of ours.
  // `device_memory`: for add_device_region().
  // `silence_s`: a connection with a write that has not come back for so long is lost.
  Fabric(const std::string& library, const std::string& provider, const std::string& poll,
         uint32_t window = 0, double silence_s = 60, bool device_memory = false);
  ~Fabric();

  std::string library_version() const { return hub_->library.version(); }
  const fi_info& info() const { return *info_.get(); }
  const Provider& provider() const { return hub_->provider; }
  Limits posting() const { return limits_of(hub_->provider, info(), hub_->window); }
  std::vector<Device> devices() const;
  int event_fd() const;
  std::vector<Event> take_events(size_t most);

  int add_group(const std::vector<std::pair<std::string, std::string>>& nics, int cpu);
  int wake_fd(int group) const;
  int listen(int nic, const std::string& address, int port);
  void unlisten(int nic);
  std::string endpoint_name(int64_t session, int nic);
  // Mapped, and being registered. Pinning takes long: who holds a lock that others need (Python's)
  // lets go of it and waits for `done` before keep_region().
  struct NewRegion {
    std::shared_ptr<Region> region;
    std::future<Error> done;
  };
  NewRegion begin_region(int group, int fd, uint64_t size, uint64_t page_bytes);
  NewRegion begin_device_region(int group, int dmabuf, uint64_t address, uint64_t size,
                                uint64_t page_bytes, int device);
  int keep_region(NewRegion added);  // its number
  void remove_region(int region);
  // For digests, which other threads compute; it keeps the memory mapped.
  std::shared_ptr<const Region> region(int number) const;
  int add_counter(int page_fd);
  void remove_counter(int counter);

  void open_session(int64_t session, const std::vector<int>& nics,
                    const std::vector<int>& writable, const std::string& token);
  std::vector<Descriptor> descriptors(int64_t session);
  void carry(int64_t session, int region, int group);
  void connect(int64_t session, Pair pair, const std::string& endpoint, double deadline_s);
  void set_remote(int64_t session, RemoteTable table);
  void probe(int64_t session, bool answer = false);
  void fence(int64_t session, std::optional<Pair> pair);

  void arm(int slot, int generation, int64_t session, int64_t expected);
  void disarm(int slot);
  int64_t counted(int slot) const;

  void open_transfer(int64_t transfer, int64_t session, int64_t immediate,
                     std::optional<Pair> only = std::nullopt);
  void submit(const SubmitArguments& arguments, std::vector<Span> spans);
  void finish(int64_t transfer);
  void stop(int64_t transfer);
  std::vector<RecordRow> close_transfer(int64_t transfer);

  std::vector<std::pair<const char*, uint64_t>> statistics() const;
  std::vector<uint64_t> turns() const;  // of each group's thread
  const std::vector<const Nic*>& nics() const { return nics_; }
  struct PeerRow {
    int64_t session;
    const PairFlow* pair;
  };
  std::vector<PeerRow> peers() const;
  Error close();  // the first thing that the provider did not close

 private:
  struct Session {
    std::shared_ptr<SessionShared> shared;
    std::set<int> groups;
    std::set<int> nics;
    std::vector<int> writable;
    std::map<int, std::set<int>> carried;  // by group: regions of other groups
    std::shared_ptr<const RemoteTable> remote;
    bool fencing = false;
  };

  void check_open() const;
  NewRegion begin(int group, std::unique_ptr<Mapping> memory, Fd dmabuf, int device,
                  uint64_t page_bytes);
  std::vector<std::shared_ptr<Region>> writable_on(const Session& session, int group) const;
  Session& find_session(int64_t session);
  std::shared_ptr<Transfer> find_transfer(int64_t transfer) const;
  int group_of(int nic) const;
  Group& group(int number) const;
  Error run_and_wait(int group, std::function<Error(Group&)> work) const;
  void check_bounds(const SubmitArguments& arguments, const Region& region,
                    const Session& session, const std::vector<Span>& spans) const;

  std::unique_ptr<Hub> hub_;
  Info info_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<const Nic*> nics_;  // by number
  std::vector<int> nic_groups_;
  std::map<int, std::shared_ptr<Region>> regions_;
  std::set<int> counters_;
  std::map<int64_t, Session> sessions_;
  std::map<int64_t, std::shared_ptr<Transfer>> transfers_;
  int next_region_ = 0;
  int next_counter_ = 0;
  bool closed_ = false;
};

}  // namespace pdnode
