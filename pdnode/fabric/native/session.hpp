// A peer session, its connections and the operations on them.
#pragma once

#include <rdma/fi_endpoint.h>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "events.hpp"
#include "fid.hpp"
#include "memory.hpp"
#include "nic.hpp"
#include "stats.hpp"
#include "transfer.hpp"

namespace pdnode {

constexpr int kScratch = -1;  // region and rank number of the probe page
constexpr size_t kScratchBytes = 4096;
constexpr int kMaxNics = 64;  // of a node; the scratch page has a word for each remote one
// Words [0, 64) of the scratch page are written by the peer, one per NIC of it; the rest is ours.
constexpr size_t kProbeSourceOffset = 2048;

struct Descriptor {
  int region, nic;
  uint64_t offset, length, base, key;
};

struct RemotePiece {
  uint64_t offset, length, base, key;
};

// A region of the peer. Per NIC: pieces sorted by offset, contiguous from 0.
struct RemoteRegion {
  uint64_t size = 0;
  std::map<int, std::vector<RemotePiece>> pieces;
  const RemotePiece* find(const std::vector<RemotePiece>& of_nic, uint64_t offset) const;
};
using RemoteTable = std::map<int, RemoteRegion>;  // by rank, kScratch among them

// Shared by Python's thread and the groups.
struct SessionShared {
  SessionShared(int64_t id_, std::string token_) : id(id_), token(std::move(token_)) {}
  const int64_t id;
  const std::string token;
  PairFlows flows;
  std::atomic<int> opening{0};  // groups that have not registered yet
  std::atomic<bool> opened{false};
  std::atomic<bool> broken{false};  // a registration failed

  std::mutex mutex;  // set-up only
  std::vector<Descriptor> descriptors;
  std::map<int, std::string> endpoint_names;
};

struct Connection;
struct Receiver;
struct RdmEndpoint;

// The context of one operation. libfabric may write to `context` until the operation has come
// back, so an Op is returned to its pool only then. One whose connection was closed without giving
// it back is abandoned: the pool gets it once the queue cannot hold anything of it any more.
struct Op {
  enum class Kind : uint8_t { kFree, kPages, kProbe, kReceive, kAbandoned };
  fi_context2 context{};  // first: libfabric returns its address
  Op* previous = nullptr;
  Op* next = nullptr;
  Connection* connection = nullptr;  // of pages and probes
  Receiver* receiver = nullptr;      // of a receive
  Program* program = nullptr;
  int64_t posted_ns = 0;
  uint64_t bytes = 0;
  uint32_t pages = 0;
  uint32_t layer = 0;
  Kind kind = Kind::kFree;
  RdmEndpoint* condemned = nullptr;  // of an abandoned one
};

class OpPool {
 public:
  // `allocated`: counts the Ops that it has made; it never has less.
  explicit OpPool(Counter* allocated) : allocated_(allocated) {}
  Op* take();
  void give(Op* op);

 private:
  static constexpr size_t kChunk = 256;
  Counter* allocated_;
  std::vector<std::unique_ptr<Op[]>> chunks_;
  Op* free_ = nullptr;
};

struct SessionPart;

// The receives of one endpoint, where each immediate consumes one (Limits::posts_receives).
struct Receiver {
  fid_ep* ep = nullptr;
  Op* ops = nullptr;  // posted
  uint32_t owed = 0;  // still to post
  int64_t refused_ns = 0;  // since when the provider says "try again"
  void link(Op* op);
  void unlink(Op* op);
};

// FI_EP_RDM: the endpoint of a session on one NIC, shared by its pairs there. libfabric crashes
// when one is closed during a connection's set-up, so a fenced endpoint that is not known to be
// up is condemned: kept, without registrations, and closed later.
struct RdmEndpoint {
  std::unique_ptr<uint8_t[]> scratch;  // a probe that is still queued reads it
  Fid<fid_av> av;
  Fid<fid_ep> ep;
  Receiver receiver;
  size_t name_bytes = 0;
  unsigned abandoned = 0;  // operations that have not come back
  int64_t condemned_ns = 0;
};

struct Connection {
  enum class State : uint8_t { kConnecting, kUp, kLost };
  SessionPart* part = nullptr;
  Pair pair{-1, -1};
  Nic* nic = nullptr;
  State state = State::kConnecting;
  bool was_up = false;
  Fid<fid_ep> own;        // FI_EP_MSG
  fid_ep* ep = nullptr;   // own, or the session's RdmEndpoint
  fi_addr_t peer = FI_ADDR_UNSPEC;
  std::vector<uint8_t> address;  // what connect() was given; empty where the peer connected
  int64_t deadline_ns = 0;  // of connecting, or of the probe; 0: none
  int64_t patience_ns = 0;  // as given to connect()
  Receiver receiver;        // FI_EP_MSG
  int64_t refused_ns = 0;   // since when the provider says "try again" and gives nothing back
  int64_t refused_last_ns = 0;
  Op* ops = nullptr;        // outstanding ones, the newest first
  Op* oldest = nullptr;
  bool bell_owed = false;   // the last post had FI_MORE: it may wait in the device for another
  uint32_t writes = 0;      // in flight, pages and probes
  uint64_t bytes = 0;
  // Set when the window is full, until half of it has come back: small writes go out in bursts,
  // which costs less than one at a time (docs/performance.md).
  bool full = false;
  bool probe_held = false;  // until the peer's has come
  bool probe_wanted = false, probe_done = false, peer_probed = false, probed = false;
  Flow* flow = nullptr;

  bool has_room(bool urgent) const {
    const Limits& limits = nic->limits;
    return urgent ? writes < limits.urgent_window_writes && bytes < kUrgentWindowBytes
                  : !full;
  }
  void link(Op* op);
  void unlink(Op* op);
};

// What a session needs to have registered on one NIC, made by whichever thread registers.
struct Prepared {
  Error error;
  std::vector<std::shared_ptr<Region>> held;  // unmapped after the registrations are closed
  std::unique_ptr<uint8_t[]> scratch;
  Registration scratch_registration;
  std::map<int, std::vector<Registration>> regions;  // by number; with session_registration only
};

// What the session has registered on one NIC.
struct NicPart {
  Nic* nic = nullptr;
  bool registered = false;
  Prepared memory;
  std::unique_ptr<RdmEndpoint> rdm;
};

// One group's part of a session. The group's thread only.
struct SessionPart {
  std::shared_ptr<SessionShared> shared;
  std::vector<std::shared_ptr<Region>> writable;
  std::shared_ptr<const RemoteTable> remote;
  std::map<int, NicPart> nics;
  std::vector<std::unique_ptr<Connection>> connections;
  std::vector<std::shared_ptr<Program>> programs;  // that have not ended
  std::deque<Program*> ready;                      // that have something due to post
  size_t next_connection = 0;                      // round robin

  Connection* find(Pair pair) const;
};

}  // namespace pdnode
