// What differs between providers: one table row each, and what fi_getinfo says about them.
#pragma once

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <string>
#include <vector>

#include "error.hpp"
#include "library.hpp"

namespace pdnode {

struct Provider {
  const char* name;       // in the configuration
  const char* prov_name;  // compared exactly: never a fall-back, never a layered provider
  fi_ep_type endpoint;
  // The fence: closing the session's registrations (and its endpoint), or, where false, closing
  // the connection alone; then one registration per NIC serves all sessions.
  bool session_registration;
  uint64_t delivery_flag;  // per operation; in the hints it would remove verbs from the answer
  const char* delivery;    // what a completion means
  uint64_t piece_entries;  // page-table entries of the largest registration
  uint64_t nic_entries;    // and of all registrations of a NIC
  bool by_domain_name;     // NIC found by its name instead of its source address
  bool pins;               // registering takes long and is charged to RLIMIT_MEMLOCK: done aside
  bool closes_any_time;    // false: closing an endpoint that is still connecting crashes
  bool doorbell;           // a post costs little without it: FI_MORE on all but the last
  bool kernel_sockets;     // its connections are TCP sockets of this process
  // In flight per connection, unless the provider's queue is shorter. A third of it is kept free
  // for layers that were just raised: they do not wait for room behind bulk.
  uint32_t window_writes;
};

// Null for an unknown name.
const Provider* find_provider(const std::string& name);
std::string provider_names();

// The first fi_info of this provider, with FI_HMEM and API 1.20 for memory of devices. `node`
// empty: any address; else it is our own.
Error query(const Library& library, const Provider& provider, const std::string& node,
            const std::string& service, const std::string& domain, bool device_memory, Info* info);

// A device as the provider lists it. Empty and 0: it does not say.
struct Device {
  std::string name, pci, state;  // pci as sysfs writes it; state: up, down
  uint64_t bits_per_s = 0;
};

Error list_devices(const Library& library, const Provider& provider, std::vector<Device>* found);

// Limits of posting, from the provider's attributes and our own bounds; `most_writes` (0: none)
// bounds the window further.
struct Limits {
  size_t segments;        // min(iov_limit, rma_iov_limit, kMaxSegments)
  size_t message_bytes;
  // In flight per connection; what a layer that was just raised may use on top is a third.
  uint32_t window_writes, urgent_window_writes;
  bool posts_receives;    // FI_RX_CQ_DATA: an immediate consumes a posted receive
  uint32_t receives;      // for each connection: twice the peer's window, as far as they fit. A device
                          // that finds none tries again, which is slow.
  bool local_registration;
  bool virtual_addresses;
  bool provider_keys;
};
Limits limits_of(const Provider& provider, const fi_info& info, uint32_t most_writes);

constexpr size_t kMaxSegments = 4;           // more than 4 fail late on tcp (measured)
constexpr uint64_t kWindowBytes = 4 << 20;
constexpr uint64_t kUrgentWindowBytes = 6 << 20;
constexpr uint64_t kMergedBytes = 1 << 20;   // largest merged write
constexpr uint64_t kUrgentBytes = 64 << 10;  // while layers are still to come: a post of 1 MiB
                                             // takes 220 µs, in which no counter is looked at
constexpr uint32_t kMaxPages = 4095;         // weight is 12 bits
constexpr int64_t kRefusedNs = 3'000'000'000;  // "try again" and nothing else, for so long
constexpr int64_t kRefusedGapNs = 1'000'000'000;  // a blocked post is tried again every millisecond
constexpr int kBatch = 32;                   // posts per batch
constexpr int kRailRun = 4;                  // the same, where a session has several connections

}  // namespace pdnode
