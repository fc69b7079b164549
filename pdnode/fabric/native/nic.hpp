// One NIC: its fabric, domain, queues and registrations. Touched by its group's thread only, once
// that thread runs.
#pragma once

#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_rma.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "error.hpp"
#include "fid.hpp"
#include "library.hpp"
#include "memory.hpp"
#include "provider.hpp"
#include "stats.hpp"

namespace pdnode {

// What a NIC has registered. Any thread.
struct Account {
  std::atomic<uint64_t> bytes{0}, entries{0}, registrations{0};
};

// One registration's share of its NIC's account.
class Charge {
 public:
  Charge() = default;
  Charge(Account* account, uint64_t bytes, uint64_t entries);
  Charge(Charge&& other) noexcept;
  Charge& operator=(Charge&& other) noexcept;
  ~Charge() { reset(); }
  void reset();

 private:
  Account* account_ = nullptr;
  uint64_t bytes_ = 0, entries_ = 0;
};

// One piece of memory registered with one NIC: [offset, offset + length) of its region.
struct Registration {
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t base = 0;  // what a writer adds its offset within the piece to
  uint64_t key = 0;
  Charge charge;
  Fid<fid_mr> mr;  // closed first
};

constexpr size_t kCompletionQueueEntries = 16384;
constexpr uint64_t kEmptyRun = 64;

struct Queues {
  Fid<fid_cq> cq;
  Fid<fid_eq> eq;  // FI_EP_MSG only
  int cq_fd = -1;  // −1: the provider has no wait object
  int eq_fd = -1;
};

struct Nic {
  Nic(const Library& library_, const Provider& provider_, int number_, std::string name_,
      std::string address_, uint32_t window_, bool device_memory_)
      : library(library_), provider(provider_), number(number_), name(std::move(name_)),
        address(std::move(address_)), window(window_), device_memory(device_memory_) {}

  Error open();
  Error open_queues(bool waitable, Queues* queues) const;
  // Known immediate with the top bit set, payload and delivery completion over a throw-away pair
  // of endpoints of this domain. Blocks, at most 10 s.
  Error self_test() const;
  // Opens the passive endpoint and reports the bound port.
  Error listen(const std::string& host, int port, int* bound);
  // To be repeated, with the event queue read in between, until it is 0: then a listener may be
  // closed. libfabric lets what it has accepted on kernel sockets, and has not heard a request from,
  // point to the listener for ever: a request that came later would be read through freed memory.
  // So these are ended first. `taken`: the connections that came through a listener.
  size_t cut_half_open(const fid_pep& listener, const std::vector<fid_ep*>& taken) const;

  // Active endpoint on this domain, bound to the queues and enabled. `info`: our own, or that of
  // a connection request.
  Error open_endpoint(fi_info* info, const Queues& on, fid_av* av, Fid<fid_ep>* endpoint) const;
  Error open_av(Fid<fid_av>* av) const;
  // A copy of our info with the destination set, which verbs wants when the endpoint is made.
  Info info_for(const void* address_bytes, size_t size) const;

  // The registering calls may come from a second thread where the provider pins.
  Error register_piece(const Memory& memory, uint64_t offset, uint64_t length, uint64_t access,
                       Registration* registration) const;
  // All of it, in pieces that are multiples of its pages and within the provider's limits.
  Error register_all(const Memory& memory, uint64_t access,
                     std::vector<Registration>* pieces) const;

  const char* label() const { return provider.name; }

  const Library& library;
  const Provider& provider;
  const int number;
  const std::string name;
  const std::string address;
  const uint32_t window;  // most writes in flight per connection; 0: the provider's
  const bool device_memory;
  Limits limits{};
  Flow flow;
  mutable Account account;
  // Of the completion queue: entries read, "nothing there" in a row, and how often that came to
  // kEmptyRun: then the queue was empty, whatever a single read may say.
  uint64_t entries_read = 0, empty_run = 0, empty_runs = 0;
  std::string dead;    // why nothing more can be heard of it; empty: it is not

  // In this order: they are closed from the last to the first.
  Info info;
  Fid<fid_fabric> fabric;
  Fid<fid_domain> domain;
  Queues queues;
  std::vector<Fid<fid_pep>> listeners;
};

// host:port or [host]:port, numeric only: a name would have to be resolved, which blocks.
Error parse_endpoint(const std::string& text, std::vector<uint8_t>* address);

}  // namespace pdnode
