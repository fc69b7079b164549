// Sessions of a group: registrations, connections, and what the event queue says about them.

#include <rdma/fi_errno.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "group.hpp"

namespace pdnode {

namespace {

constexpr int64_t kAcceptPatienceNs = 10'000'000'000;
constexpr int kMostRounds = 1000;  // of ending what a listener has accepted

// Connection data: magic, version, the two NIC numbers, length of the token, token. The length is
// said because a provider may pad what arrives (verbs does).
constexpr uint8_t kMagic[] = {'p', 'd', 'n', 1};
constexpr size_t kTokenOffset = sizeof kMagic + 5;

void put_u16(std::string* out, int value) {
  out->push_back(static_cast<char>(value & 0xff));
  out->push_back(static_cast<char>(value >> 8));
}

int get_u16(const uint8_t* data) { return data[0] | data[1] << 8; }

std::string connection_data(Pair pair, const std::string& token) {
  std::string data(reinterpret_cast<const char*>(kMagic), sizeof kMagic);
  put_u16(&data, pair.first);
  put_u16(&data, pair.second);
  data.push_back(static_cast<char>(token.size()));
  return data + token;
}

// In constant time: nothing about the token shows in how long a refusal takes.
bool equal_secret(const std::string& secret, const uint8_t* data, size_t size) {
  if (secret.size() != size) return false;
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < size; ++i) {
    difference = static_cast<uint8_t>(difference | (static_cast<uint8_t>(secret[i]) ^ data[i]));
  }
  return difference == 0;
}

}  // namespace

SessionPart* Group::find_part(int64_t session) const {
  const auto found = parts_.find(session);
  return found == parts_.end() ? nullptr : found->second.get();
}

Nic* Group::find_nic(int index) const {
  const auto found = std::find_if(nics.begin(), nics.end(),
                                  [index](const auto& nic) { return nic->number == index; });
  return found == nics.end() ? nullptr : found->get();
}

Error Group::listen(int nic, const std::string& host, int port, int* bound) {
  return find_nic(nic)->listen(host, port, bound);
}

Error Group::unlisten(int nic) {
  Nic* on = find_nic(nic);
  for (int round = 0; round < kMostRounds; ++round) {
    // A request that waits is answered by the listener it came to, unless there are hundreds.
    for (int i = 0; i < 16 && read_events(on); ++i) {
    }
    std::vector<fid_ep*> taken;
    for (const auto& [fid, connection] : endpoints_) {
      if (connection->nic == on) taken.push_back(connection->ep);
    }
    size_t left = 0;
    for (const auto& listener : on->listeners) left += on->cut_half_open(*listener.get(), taken);
    if (left > 0) continue;
    on->listeners.clear();
    return Error();
  }
  return Error("unlisten: NIC " + on->name + " is asked for connections faster than it refuses");
}

void Group::open_session(const std::shared_ptr<SessionShared>& shared, const std::vector<int>& on,
                         const std::vector<std::shared_ptr<Region>>& writable) {
  auto& part = parts_[shared->id];
  if (!part) {
    part = std::make_unique<SessionPart>();
    part->shared = shared;
  }
  part->writable = writable;
  for (const int index : on) {
    Nic* nic = find_nic(index);
    if (part->nics[index].registered) {
      install(shared, nic, nullptr);
      continue;
    }
    aside([this, shared, nic, writable]() -> Command {
      auto prepared = std::make_shared<Prepared>();
      prepared->error = prepare_nic(*nic, writable, prepared.get());
      return [shared, nic, prepared](Group& there) {
        there.install(shared, nic, prepared.get());
        *prepared = Prepared();
      };
    });
  }
}

// Null: the NIC was registered before. The session may be gone, or another one of its number.
void Group::install(const std::shared_ptr<SessionShared>& shared, Nic* nic, Prepared* prepared) {
  SessionPart* part = find_part(shared->id);
  if (part == nullptr || part->shared != shared) return;
  if (prepared != nullptr && !part->nics[nic->number].registered) {
    const Error error = prepared->error ? prepared->error : install_part(part, nic, prepared);
    if (error) {
      if (!shared->broken.exchange(true)) say_lost(shared->id, {-1, -1}, error.text());
      return;
    }
  }
  if (shared->opening.fetch_sub(1) == 1 && !shared->broken.load()) {
    shared->opened.store(true);
    Event event;
    event.session = shared->id;
    hub_.events.push(std::move(event));
  }
}

Error Group::install_part(SessionPart* part, Nic* nic, Prepared* prepared) {
  NicPart& on = part->nics[nic->number];
  on.nic = nic;
  on.memory = std::move(*prepared);
  if (hub_.provider.endpoint == FI_EP_RDM && !on.rdm) {
    if (Error error = open_rdm(part, &on)) return error;
  }
  on.registered = true;
  const Registration& scratch = on.memory.scratch_registration;
  std::vector<Descriptor> found = {
      {kScratch, nic->number, 0, kScratchBytes, scratch.base, scratch.key}};
  hub_.counters.registrations.fetch_add(1);
  for (const auto& region : part->writable) {
    const auto& pieces = hub_.provider.session_registration
                             ? on.memory.regions[region->number]
                             : base_registrations_[region->number][nic->number];
    for (const Registration& piece : pieces) {
      found.push_back(
          {region->number, nic->number, piece.offset, piece.length, piece.base, piece.key});
    }
    if (hub_.provider.session_registration) hub_.counters.registrations.fetch_add(pieces.size());
  }
  const std::lock_guard<std::mutex> lock(part->shared->mutex);
  auto& all = part->shared->descriptors;
  all.erase(std::remove_if(all.begin(), all.end(),
                           [nic](const Descriptor& one) { return one.nic == nic->number; }),
            all.end());
  all.insert(all.end(), found.begin(), found.end());
  return Error();
}

Error Group::open_rdm(SessionPart* part, NicPart* on) {
  auto rdm = std::make_unique<RdmEndpoint>();
  const Nic& nic = *on->nic;
  if (Error error = nic.open_av(&rdm->av)) return error;
  if (Error error = nic.open_endpoint(nic.info.get(), nic.queues, rdm->av.get(), &rdm->ep)) {
    return error;
  }
  std::array<char, 512> name{};
  size_t size = name.size();
  const int code = fi_getname(&rdm->ep->fid, name.data(), &size);
  if (Error error = hub_.library.check("fi_getname", code, nic.label())) return error;
  rdm->name_bytes = size;
  on->rdm = std::move(rdm);
  const std::lock_guard<std::mutex> lock(part->shared->mutex);
  part->shared->endpoint_names[nic.number] = std::string(name.data(), size);
  return Error();
}

Connection* Group::add_connection(SessionPart* part, Pair pair, Nic* nic) {
  PairFlow* flow = part->shared->flows.find_or_add(pair.first, pair.second);
  if (flow == nullptr) return nullptr;
  part->connections.push_back(std::make_unique<Connection>());
  Connection* connection = part->connections.back().get();
  connection->part = part;
  connection->pair = pair;
  connection->nic = nic;
  connection->flow = &flow->flow;
  return connection;
}

// Takes out a connection whose set-up failed. On FI_EP_RDM it has nothing of its own, and the
// endpoint is that of the session's other pairs.
void Group::forget(SessionPart* part, Connection* failed) {
  if (failed->own) {
    close_connections(part, {failed});
    return;
  }
  auto& all = part->connections;
  all.erase(std::find_if(all.begin(), all.end(),
                         [failed](const auto& one) { return one.get() == failed; }));
}

void Group::connect(int64_t session, Pair pair, const std::vector<uint8_t>& address,
                    int64_t patience) {
  SessionPart* part = find_part(session);
  if (part == nullptr) return;  // fenced meanwhile: `fenced` is the answer
  if (Connection* old = part->find(pair)) {
    if (old->state != Connection::State::kLost) return;
    // Only a set-up that failed may be repeated: after a loss nothing is carried over.
    if (old->was_up) {
      say_lost(session, pair, "lost before: the pair must be fenced first");
      return;
    }
    forget(part, old);
  }
  Connection* connection = add_connection(part, pair, find_nic(pair.first));
  Error error;
  if (connection == nullptr) {
    say_lost(session, pair, "more than " + std::to_string(kMaxPairs) + " pairs in one session");
    return;
  }
  connection->address = address;
  connection->patience_ns = patience;
  connection->deadline_ns = now_ns() + patience;
  const auto on = part->nics.find(pair.first);
  if (on == part->nics.end() || !on->second.registered) {
    error = Error("the session is not open on NIC " + std::to_string(pair.first));
  } else if (!connection->nic->dead.empty()) {
    error = Error(connection->nic->dead);
  } else if (hub_.provider.endpoint == FI_EP_MSG) {
    error = connect_msg(connection, address);
  } else {
    error = connect_rdm(connection, address);
  }
  if (error) mark_lost(connection, error.text());
}

// Endpoint, its place in the table by which events find it, and posted receives where needed.
Error Group::prepare(Connection* connection, fi_info* info) {
  Nic& nic = *connection->nic;
  if (Error error = nic.open_endpoint(info, nic.queues, nullptr, &connection->own)) return error;
  connection->ep = connection->own.get();
  endpoints_[&connection->ep->fid] = connection;
  if (!nic.limits.posts_receives) return Error();
  connection->receiver.ep = connection->ep;
  connection->receiver.owed = nic.limits.receives;
  return post_receives(&connection->receiver);
}

void Group::lose_all(const fid_ep* endpoint, const std::string& why) {
  for (auto& [id, part] : parts_) {
    for (auto& connection : part->connections) {
      if (connection->ep == endpoint) mark_lost(connection.get(), why);
    }
  }
}

Error Group::connect_msg(Connection* connection, const std::vector<uint8_t>& address) {
  const Info info = connection->nic->info_for(address.data(), address.size());
  if (!info) return Error("fi_dupinfo: out of memory");
  if (Error error = prepare(connection, info.get())) return error;
  const std::string data = connection_data(connection->pair, connection->part->shared->token);
  const int code = fi_connect(connection->ep, address.data(), data.data(), data.size());
  return hub_.library.check("fi_connect", code, hub_.provider.name);
}

Error Group::connect_rdm(Connection* connection, const std::vector<uint8_t>& address) {
  NicPart& on = connection->part->nics[connection->pair.first];
  if (address.size() != on.rdm->name_bytes) {
    return Error("endpoint: a name of " + std::to_string(address.size()) +
                 " bytes is not one of this provider");
  }
  if (fi_av_insert(on.rdm->av.get(), address.data(), 1, &connection->peer, 0, nullptr) != 1) {
    return Error("endpoint: fi_av_insert refused it");
  }
  connection->ep = on.rdm->ep.get();
  if (on.nic->limits.posts_receives) {
    on.rdm->receiver.ep = connection->ep;
    on.rdm->receiver.owed += on.nic->limits.receives;
    if (Error error = post_receives(&on.rdm->receiver)) return error;
  }
  mark_connected(connection);
  return Error();
}

void Group::set_remote(int64_t session, std::shared_ptr<const RemoteTable> remote) {
  if (SessionPart* part = find_part(session)) part->remote = std::move(remote);
}

void Group::mark_connected(Connection* connection) {
  if (connection->state != Connection::State::kConnecting) return;
  connection->state = Connection::State::kUp;
  connection->was_up = true;
  connection->deadline_ns = 0;
  hub_.counters.connections.fetch_add(1);
  Event event;
  event.kind = EventKind::kConnected;
  event.session = connection->part->shared->id;
  event.pair = connection->pair;
  hub_.events.push(std::move(event));
  check_probed(connection);
}

void Group::mark_lost(Connection* connection, const std::string& why) {
  if (connection->state == Connection::State::kLost) return;
  if (connection->state == Connection::State::kUp) hub_.counters.connections.fetch_sub(1);
  connection->state = Connection::State::kLost;
  connection->deadline_ns = 0;
  if (connection->probe_wanted) --probes_waiting_;
  connection->probe_wanted = false;
  say_lost(connection->part->shared->id, connection->pair, why);
}

void Group::say_lost(int64_t session, Pair pair, const std::string& why) {
  Event event;
  event.kind = EventKind::kLost;
  event.session = session;
  event.pair = pair;
  event.text = why;
  hub_.events.push(std::move(event));
}

bool Group::read_events(Nic* nic) {
  if (!nic->queues.eq) return false;
  bool any = false;
  for (int i = 0; i < 64; ++i) {
    alignas(fi_eq_cm_entry) std::array<uint8_t, 1024> buffer;
    uint32_t kind = 0;
    const auto size = fi_eq_read(nic->queues.eq.get(), &kind, buffer.data(), buffer.size(), 0);
    if (size == -FI_EAVAIL) {
      fi_eq_err_entry failure = {};
      if (fi_eq_readerr(nic->queues.eq.get(), &failure, 0) < 0) break;
      any = true;
      // By its address only: the endpoint may be closed. A closed one has no events left, the
      // provider removes them.
      const auto found = endpoints_.find(failure.fid);
      if (found != endpoints_.end()) {
        mark_lost(found->second,
                  hub_.library.check("connection", -failure.err, nic->label()).text());
      }
      continue;
    }
    if (size < 0) break;
    any = true;
    const auto* entry = reinterpret_cast<const fi_eq_cm_entry*>(buffer.data());
    if (static_cast<size_t>(size) < sizeof *entry) continue;  // of a kind that is none of ours
    if (kind == FI_CONNREQ) {
      on_request(nic, buffer.data(), static_cast<size_t>(size));
      continue;
    }
    const auto found = endpoints_.find(entry->fid);
    if (found == endpoints_.end()) continue;
    if (kind == FI_CONNECTED) {
      mark_connected(found->second);
    } else if (kind == FI_SHUTDOWN) {
      mark_lost(found->second, "the peer closed the connection");
    }
  }
  return any;
}

SessionPart* Group::match_request(const Nic& nic, const uint8_t* data, size_t size,
                                  int* remote) const {
  if (size < kTokenOffset || std::memcmp(data, kMagic, sizeof kMagic) != 0) return nullptr;
  *remote = get_u16(data + sizeof kMagic);
  const int local = get_u16(data + sizeof kMagic + 2);
  const size_t length = data[kTokenOffset - 1];
  if (length > size - kTokenOffset) return nullptr;
  SessionPart* match = nullptr;
  for (const auto& [id, part] : parts_) {
    const bool equal = equal_secret(part->shared->token, data + kTokenOffset, length);
    const auto on = part->nics.find(nic.number);
    if (equal && on != part->nics.end() && on->second.registered) match = part.get();
  }
  return local == nic.number && *remote < kMaxNics && nic.dead.empty() ? match : nullptr;
}

void Group::on_request(Nic* nic, const uint8_t* buffer, size_t size) {
  const auto* entry = reinterpret_cast<const fi_eq_cm_entry*>(buffer);
  const Info info(&hub_.library, entry->info);
  int remote = -1;
  SessionPart* part = match_request(*nic, entry->data, size - sizeof *entry, &remote);
  if (part != nullptr) {
    const Pair pair{nic->number, remote};
    Connection* old = part->find(pair);
    if (old != nullptr && (old->state != Connection::State::kLost || old->was_up)) {
      part = nullptr;  // one connection per pair and token
    } else if (old != nullptr) {
      forget(part, old);
    }
  }
  const auto reject = [&] {
    hub_.counters.rejected_connections.fetch_add(1);
    for (auto& listener : nic->listeners) {
      if (&listener->fid == entry->fid) fi_reject(listener.get(), info->handle, nullptr, 0);
    }
  };
  Connection* connection =
      part == nullptr ? nullptr : add_connection(part, {nic->number, remote}, nic);
  if (connection == nullptr) {
    reject();
    return;
  }
  connection->patience_ns = kAcceptPatienceNs;
  connection->deadline_ns = now_ns() + kAcceptPatienceNs;
  Error error = prepare(connection, info.get());
  if (!connection->own) reject();  // no endpoint has taken the request over
  if (!error) {
    error = hub_.library.check("fi_accept", fi_accept(connection->ep, nullptr, 0), nic->label());
  }
  if (error) mark_lost(connection, error.text());
}

void Group::check_deadlines(int64_t now) {
  next_deadline_ns_ = 0;
  const auto consider = [this](int64_t deadline) {
    if (next_deadline_ns_ == 0 || deadline < next_deadline_ns_) next_deadline_ns_ = deadline;
  };
  for (auto& [id, part] : parts_) {
    for (auto& connection : part->connections) {
      if (const Op* oldest = connection->oldest;
          oldest != nullptr && connection->state == Connection::State::kUp) {
        consider(oldest->posted_ns + hub_.silence_ns);
        if (now - oldest->posted_ns >= hub_.silence_ns) {
          lose(connection.get(), "write: no completion within " +
                                     std::to_string(hub_.silence_ns / 1'000'000) + " ms");
        }
      }
      if (connection->deadline_ns == 0) continue;
      if (now < connection->deadline_ns) {
        consider(connection->deadline_ns);
        continue;
      }
      const bool connecting = connection->state == Connection::State::kConnecting;
      mark_lost(connection.get(),
                std::string(connecting ? "no connection within " : "no probe within ") +
                    std::to_string(connection->patience_ns / 1'000'000) + " ms");
    }
  }
  if (!retired_.empty()) release_retired();
  if (!condemned_.empty()) {
    release_condemned(now);
    consider(now + 1'000'000'000);
  }
}

}  // namespace pdnode
