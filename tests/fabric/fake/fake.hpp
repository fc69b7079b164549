// A libfabric that does what the rules of real NICs allow, chosen by a seed. One process, no
// network, no threads of its own: a write waits on the "wire" until somebody reads a queue.
//
// It also watches its caller: what a provider may rely on and the caller breaks is a violation.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_rma.h>

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace fake {

// How the device behaves. `fake_control(name, value)` sets each by its name; a personality
// ("efa", "verbs", "worse") sets them all.
struct Rules {
  // What fi_getinfo says.
  int64_t segments = 1;
  int64_t provider_keys = 1;      // 32 bits, chosen here
  int64_t virtual_addresses = 1;
  int64_t local_registration = 1;
  int64_t posts_receives = 0;     // FI_RX_CQ_DATA: an immediate consumes a posted receive
  int64_t data_bytes = 4;         // cq_data_size
  int64_t message_bytes = 1 << 30;
  int64_t window = 512;           // tx_attr->size: more in flight is refused
  // How writes travel.
  int64_t unordered = 0;
  int64_t target_progress = 0;    // nothing lands until the target reads a queue
  int64_t both_addresses = 0;     // the target must have the sender in its address vector
  int64_t holds_more = 1;         // FI_MORE: the doorbell is not rung, nothing leaves the device
  int64_t honours_delivery = 1;   // FI_DELIVERY_COMPLETE counts per operation; else all do (RC)
  int64_t writes_twice = 0;       // a payload may land again, unless the option forbids it
  int64_t order_option = 1;       // FI_OPT_EFA_WRITE_IN_ORDER_ALIGNED_128_BYTES exists
  int64_t cancels_at_close = 1;   // a closed endpoint gives its operations back
  int64_t pads_data = 0;          // connection data arrives longer than it was sent
  int64_t data_limit = 256;       // of connection data
  // Waiting.
  int64_t wait_fd = 1;
  int64_t never_blocks = 0;       // the wait fd is readable all the time
  // Registration.
  int64_t region_bytes = int64_t{1} << 40;  // the largest one
  int64_t nic_bytes = int64_t{1} << 42;     // of all together
  int64_t register_us = 0;                  // how long one takes
  int64_t hold_registrations = 0;           // until this is 0 again, or for 10 s: then it fails
  // Faults. Permille of the operations, or the number of operations that are still to suffer.
  int64_t again_permille = 0;
  int64_t again_always = 0;
  int64_t fail_next = 0;        // complete with an error
  int64_t fail_lands = 0;       // and land all the same
  int64_t lose_next = 0;        // land, but the completion never comes
  int64_t swallow_next = 0;     // neither
  int64_t repeat_next = 0;      // the immediate arrives twice
  int64_t never_connects = 0;
  int64_t hold = 0;             // nothing moves on the wire
  int64_t land_next = 0;        // but for so many writes
  int64_t refuse_after_more = 0;  // once a write has FI_MORE: "try again" until this is 0 again
  int64_t refuse_receives = 0;  // "try again" for every receive
  int64_t no_accept_next = 0;   // no endpoint can be made for a connection request
  int64_t close_fails_next = 0;  // closing an endpoint or a registration reports an error
  int64_t break_queue = 0;      // the queue of a node with writes in flight: a hard error, for ever
};

struct Fabric;
struct Domain;
struct Cq;
struct Eq;
struct Ep;

struct Fabric {
  fid_fabric fid{};
  int children = 0;
  uint32_t api = 0;
};

struct Mr {
  fid_mr fid{};
  Domain* domain = nullptr;
  uint8_t* data = nullptr;  // where the NIC finds the bytes
  size_t length = 0;
  uint64_t access = 0;
  uint8_t* base = nullptr;  // what the caller calls this place: of a device, it may not be touched
  std::shared_ptr<uint8_t> window;  // on a dma-buf, which the NIC maps by itself
};

struct Domain {
  fid_domain fid{};
  Fabric* fabric = nullptr;
  int children = 0;
  bool one_thread = false;  // FI_THREAD_DOMAIN
  bool device_memory = false;  // FI_HMEM
  std::map<uint64_t, Mr*> regions;
  int64_t registered_bytes = 0;
  std::thread::id opened_by{}, inside{};
};

struct Completion {
  void* context = nullptr;
  uint64_t flags = 0;
  uint64_t data = 0;
  int error = 0;
  uint64_t of = 0;  // name of the endpoint
};

struct Cq {
  fid_cq fid{};
  Domain* domain = nullptr;
  int users = 0;
  int fd = -1;
  bool broken = false;
  std::deque<Completion> entries;
};

struct Event {
  uint32_t kind = 0;  // 0: an error
  fid_t of = nullptr;
  fi_info* info = nullptr;
  std::string data;
  int error = 0;
  int delay = 0;  // reads until it shows
};

struct Eq {
  fid_eq fid{};
  Fabric* fabric = nullptr;
  int users = 0;
  int fd = -1;
  std::deque<Event> events;
};

struct Av {
  fid_av fid{};
  Domain* domain = nullptr;
  int users = 0;
  std::vector<uint64_t> names;
};

struct Pep {
  fid_pep fid{};
  Fabric* fabric = nullptr;
  Eq* eq = nullptr;
  uint16_t port = 0;
  bool listening = false;
};

struct Ep {
  fid_ep fid{};
  Domain* domain = nullptr;
  Cq* cq = nullptr;
  Eq* eq = nullptr;
  Av* av = nullptr;
  uint64_t name = 0;
  bool rdm = false;
  bool enabled = false;
  bool in_order = false;
  bool connected = false;
  bool broken = false;  // its queue pair is in error: everything comes back
  uint64_t peer = 0;    // name; FI_EP_MSG
  struct Request* request = nullptr;  // that it will accept
  int64_t flying = 0;
  std::deque<void*> receives;
};

// What fi_info::handle of a connection request points to.
struct Request {
  struct fid fid{};
  uint64_t from = 0;  // name of the endpoint that asks
};

struct Segment {
  const uint8_t* source = nullptr;
  uint64_t length = 0, address = 0, key = 0;
  std::shared_ptr<uint8_t> window;  // that `source` is in
};

struct Write {
  uint64_t from = 0, to = 0;  // names of endpoints
  std::vector<Segment> segments;
  std::vector<uint8_t> payload;  // where the source may not be read any more
  bool copied = false;
  bool completed = false;  // the sender has been told
  bool again = false;      // a payload that lands for the second time
  bool lost = false;       // its completion never comes
  bool torn = false;       // emulated: its immediate overtakes the payload
  int fault = 0;           // errno of its completion
  bool fault_lands = false;
  bool has_data = false;
  bool held = false;  // waits for the doorbell
  uint64_t data = 0;
  void* context = nullptr;
  int delay = 0;     // moves until it may land
};

struct World {
  std::mutex mutex;
  Rules rules;
  std::string personality;
  std::mt19937_64 chance{1};
  std::list<Write> wire;
  std::map<void*, uint64_t> contexts;  // of what has not come back, and its endpoint
  std::map<uint64_t, Ep*> endpoints;  // by name
  std::map<uint16_t, Pep*> listeners;
  std::map<std::string, int64_t> live;    // objects, by kind
  std::map<std::string, int64_t> counts;  // what happened
  std::vector<std::string> violations;
  uint64_t next_name = 1;
  uint16_t next_port = 20000;

  bool roll(int64_t permille) { return static_cast<int64_t>(chance() % 1000) < permille; }
  // True, and one less, while there are any.
  static bool use(int64_t* left) { return *left > 0 && (*left)-- > 0; }
  void violation(const std::string& what);
};

World& world();

// Takes the lock, and checks that no second thread is inside of a domain that has one.
class Entered {
 public:
  explicit Entered(Domain* domain = nullptr);

 private:
  std::lock_guard<std::mutex> lock_;
};

// info.cpp
int getinfo(uint32_t version, const char* node, const char* service, uint64_t flags,
            const fi_info* hints, fi_info** info);
fi_info* dupinfo(const fi_info* info);
void freeinfo(fi_info* info);
void set_personality(const std::string& name);
bool set_rule(const std::string& name, int64_t value);

// objects.cpp
int open_fabric(fi_fabric_attr* attr, fid_fabric** fabric, void* context);
void signal_fd(int fd);
void drain_fd(int fd);

// endpoint.cpp
int open_endpoint(fid_domain* domain, fi_info* info, fid_ep** ep, void* context);
int open_listener(fid_fabric* fabric, fi_info* info, fid_pep** pep, void* context);
int open_av(fid_domain* domain, fi_av_attr* attr, fid_av** av, void* context);

// wire.cpp
ssize_t post_write(fid_ep* ep, const fi_msg_rma* message, uint64_t flags);
ssize_t post_receive(fid_ep* ep, void* buffer, size_t length, void* desc, fi_addr_t from,
                     void* context);
void progress(Domain* domain);
bool pending_for(const Domain* domain);
void close_wire(Ep* ep);  // what of its writes stays, comes back or is dropped
Ep* find_endpoint(uint64_t name);
void push_event(Eq* eq, Event event);

}  // namespace fake
