// Endpoints, listeners, address vectors, and how two endpoints become a connection.

#include <arpa/inet.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_ext.h>

#include <algorithm>
#include <cstring>

#include "fake.hpp"

namespace fake {

namespace {

constexpr int kWriteInOrder = FI_OPT_EFA_RNR_RETRY + 6;

template <class T>
T* of(fid_t fid) {
  return reinterpret_cast<T*>(fid);
}

struct Name {
  uint64_t magic, name;
};
constexpr uint64_t kMagic = 0x66616b65'61646472;

void refuse(uint64_t name, int error) {
  if (Ep* ep = find_endpoint(name)) push_event(ep->eq, {0, &ep->fid.fid, nullptr, "", error, 0});
}

void drop_request(Request* request) {
  --world().live["request"];
  delete request;
}

int close_endpoint(fid_t fid) {
  Ep* ep = of<Ep>(fid);
  const Entered entered(ep->domain);
  World& all = world();
  all.endpoints.erase(ep->name);
  close_wire(ep);
  if (Ep* peer = ep->rdm ? nullptr : find_endpoint(ep->peer)) {
    if (peer->connected && peer->peer == ep->name) {
      push_event(peer->eq, {FI_SHUTDOWN, &peer->fid.fid, nullptr, "", 0, 0});
    }
  }
  if (ep->request != nullptr) {
    refuse(ep->request->from, FI_ECONNREFUSED);
    drop_request(ep->request);
  }
  if (ep->eq != nullptr) {
    auto& events = ep->eq->events;
    events.erase(std::remove_if(events.begin(), events.end(),
                                [ep](const Event& one) { return one.of == &ep->fid.fid; }),
                 events.end());
    --ep->eq->users;
  }
  if (ep->cq != nullptr) --ep->cq->users;
  if (ep->av != nullptr) --ep->av->users;
  --ep->domain->children;
  --all.live["ep"];
  delete ep;
  return World::use(&all.rules.close_fails_next) ? -FI_EBUSY : 0;
}

int bind_endpoint(struct fid* fid, struct fid* to, uint64_t) {
  Ep* ep = of<Ep>(fid);
  const Entered entered(ep->domain);
  if (to->fclass == FI_CLASS_CQ) {
    ep->cq = of<Cq>(to);
    ++ep->cq->users;
  } else if (to->fclass == FI_CLASS_EQ) {
    ep->eq = of<Eq>(to);
    ++ep->eq->users;
  } else {
    ep->av = of<Av>(to);
    ++ep->av->users;
  }
  return 0;
}

int control_endpoint(struct fid* fid, int command, void*) {
  Ep* ep = of<Ep>(fid);
  const Entered entered(ep->domain);
  if (command != FI_ENABLE) return -FI_ENOSYS;
  if (ep->cq == nullptr) return -FI_ENOCQ;
  if (ep->rdm ? ep->av == nullptr : ep->eq == nullptr) return ep->rdm ? -FI_ENOAV : -FI_ENOEQ;
  ep->enabled = true;
  return 0;
}

int set_option(fid_t fid, int, int name, const void* value, size_t) {
  Ep* ep = of<Ep>(fid);
  const Entered entered(ep->domain);
  if (name != kWriteInOrder || world().rules.order_option == 0) return -FI_ENOPROTOOPT;
  if (ep->enabled) return -FI_EINVAL;
  ep->in_order = *static_cast<const bool*>(value);
  return 0;
}

int name_of(fid_t fid, void* address, size_t* size) {
  if (fid->fclass == FI_CLASS_PEP) {
    const Entered entered;
    sockaddr_in name = {};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    name.sin_port = htons(of<Pep>(fid)->port);
    std::memcpy(address, &name, std::min(*size, sizeof name));
    *size = sizeof name;
    return 0;
  }
  Ep* ep = of<Ep>(fid);
  const Entered entered(ep->domain);
  const Name name = {kMagic, ep->name};
  std::memcpy(address, &name, std::min(*size, sizeof name));
  *size = sizeof name;
  return 0;
}

int peer_of(fid_ep* fid, void* address, size_t* size) {
  Ep* ep = of<Ep>(&fid->fid);
  const Entered entered(ep->domain);
  if (!ep->connected) return -FI_ENOTCONN;
  const Name name = {kMagic, ep->peer};
  std::memcpy(address, &name, std::min(*size, sizeof name));
  *size = sizeof name;
  return 0;
}

int connect_endpoint(fid_ep* fid, const void* address, const void* data, size_t size) {
  Ep* ep = of<Ep>(&fid->fid);
  const Entered entered(ep->domain);
  World& all = world();
  if (size > static_cast<size_t>(all.rules.data_limit)) return -FI_EINVAL;
  if (!ep->enabled) return -FI_EOPBADSTATE;
  if (World::use(&all.rules.never_connects)) return 0;
  const auto* to = static_cast<const sockaddr_in*>(address);
  const auto found = all.listeners.find(ntohs(to->sin_port));
  if (found == all.listeners.end() || !found->second->listening) {
    refuse(ep->name, FI_ECONNREFUSED);
    return 0;
  }
  auto* request = new Request;
  request->fid.fclass = FI_CLASS_CONNREQ;
  request->from = ep->name;
  ++all.live["request"];
  fi_info* info = dupinfo(nullptr);
  info->ep_attr->type = FI_EP_MSG;
  info->handle = &request->fid;
  std::string bytes(static_cast<const char*>(data), size);
  if (all.rules.pads_data != 0) bytes.resize(static_cast<size_t>(all.rules.data_limit));
  push_event(found->second->eq,
             {FI_CONNREQ, &found->second->fid.fid, info, bytes, 0,
              static_cast<int>(all.chance() % 3)});
  return 0;
}

int accept_connection(fid_ep* fid, const void*, size_t) {
  Ep* ep = of<Ep>(&fid->fid);
  const Entered entered(ep->domain);
  World& all = world();
  if (ep->request == nullptr || !ep->enabled) return -FI_EOPBADSTATE;
  const uint64_t from = ep->request->from;
  drop_request(ep->request);
  ep->request = nullptr;
  Ep* peer = find_endpoint(from);
  if (peer == nullptr) {
    push_event(ep->eq, {0, &ep->fid.fid, nullptr, "", FI_ECONNRESET, 0});
    return 0;
  }
  ep->peer = peer->name;
  peer->peer = ep->name;
  for (Ep* one : {ep, peer}) {
    one->connected = true;
    push_event(one->eq, {FI_CONNECTED, &one->fid.fid, nullptr, "", 0,
                         static_cast<int>(all.chance() % 4)});
  }
  return 0;
}

int reject_connection(fid_pep*, fid_t handle, const void*, size_t) {
  const Entered entered;
  auto* request = reinterpret_cast<Request*>(handle);
  refuse(request->from, FI_ECONNREFUSED);
  drop_request(request);
  return 0;
}

int close_listener(fid_t fid) {
  const Entered entered;
  Pep* pep = of<Pep>(fid);
  if (pep->eq != nullptr) --pep->eq->users;
  world().listeners.erase(pep->port);
  --pep->fabric->children;
  --world().live["pep"];
  delete pep;
  return 0;
}

int bind_listener(struct fid* fid, struct fid* to, uint64_t) {
  const Entered entered;
  of<Pep>(fid)->eq = of<Eq>(to);
  ++of<Pep>(fid)->eq->users;
  return 0;
}

int start_listening(fid_pep* fid) {
  const Entered entered;
  of<Pep>(&fid->fid)->listening = true;
  return 0;
}

int close_av(fid_t fid) {
  Av* av = of<Av>(fid);
  const Entered entered(av->domain);
  if (av->users != 0) {
    world().violation("an address vector closed with users");
    return -FI_EBUSY;
  }
  --av->domain->children;
  --world().live["av"];
  delete av;
  return 0;
}

int insert_address(fid_av* fid, const void* address, size_t count, fi_addr_t* found, uint64_t,
                   void*) {
  Av* av = of<Av>(&fid->fid);
  const Entered entered(av->domain);
  Name name;
  std::memcpy(&name, address, sizeof name);
  if (count != 1 || name.magic != kMagic) return 0;
  av->names.push_back(name.name);
  *found = av->names.size() - 1;
  return 1;
}

fi_ops endpoint_fid_ops = {sizeof(fi_ops),   close_endpoint, bind_endpoint, control_endpoint,
                           nullptr,          nullptr,        nullptr};
fi_ops listener_fid_ops = {sizeof(fi_ops), close_listener, bind_listener, nullptr,
                           nullptr,        nullptr,        nullptr};
fi_ops av_fid_ops = {sizeof(fi_ops), close_av, nullptr, nullptr, nullptr, nullptr, nullptr};
fi_ops_cm cm_ops = [] {
  fi_ops_cm ops = {};
  ops.size = sizeof ops;
  ops.getname = name_of;
  ops.getpeer = peer_of;
  ops.connect = connect_endpoint;
  ops.listen = start_listening;
  ops.accept = accept_connection;
  ops.reject = reject_connection;
  return ops;
}();
fi_ops_ep endpoint_ops = [] {
  fi_ops_ep ops = {};
  ops.size = sizeof ops;
  ops.setopt = set_option;
  return ops;
}();
fi_ops_msg message_ops = [] {
  fi_ops_msg ops = {};
  ops.size = sizeof ops;
  ops.recv = post_receive;
  return ops;
}();
fi_ops_rma write_ops = [] {
  fi_ops_rma ops = {};
  ops.size = sizeof ops;
  ops.writemsg = post_write;
  return ops;
}();
fi_ops_av av_ops = [] {
  fi_ops_av ops = {};
  ops.size = sizeof ops;
  ops.insert = insert_address;
  return ops;
}();

}  // namespace

Ep* find_endpoint(uint64_t name) {
  const auto found = world().endpoints.find(name);
  return found == world().endpoints.end() ? nullptr : found->second;
}

void push_event(Eq* eq, Event event) {
  if (eq == nullptr) return;
  eq->events.push_back(std::move(event));
  signal_fd(eq->fd);
}

int open_endpoint(fid_domain* fid, fi_info* info, fid_ep** out, void*) {
  Domain* domain = of<Domain>(&fid->fid);
  const Entered entered(domain);
  World& all = world();
  if (info->handle != nullptr && World::use(&all.rules.no_accept_next)) return -FI_ENOMEM;
  auto* ep = new Ep;
  ep->domain = domain;
  ep->name = all.next_name++;
  ep->rdm = info->ep_attr->type == FI_EP_RDM;
  if (info->handle != nullptr) ep->request = reinterpret_cast<Request*>(info->handle);
  ep->fid.fid.fclass = FI_CLASS_EP;
  ep->fid.fid.ops = &endpoint_fid_ops;
  ep->fid.ops = &endpoint_ops;
  ep->fid.cm = &cm_ops;
  ep->fid.msg = &message_ops;
  ep->fid.rma = &write_ops;
  all.endpoints[ep->name] = ep;
  ++domain->children;
  ++all.live["ep"];
  *out = &ep->fid;
  return 0;
}

int open_listener(fid_fabric* fid, fi_info* info, fid_pep** out, void*) {
  const Entered entered;
  World& all = world();
  uint16_t port = ntohs(static_cast<const sockaddr_in*>(info->src_addr)->sin_port);
  if (port == 0) {
    do {
      port = ++all.next_port;
    } while (port < 1024 || all.listeners.count(port) != 0);
  }
  if (all.listeners.count(port) != 0) return -FI_EADDRINUSE;
  auto* pep = new Pep;
  pep->fabric = of<Fabric>(&fid->fid);
  pep->port = port;
  pep->fid.fid.fclass = FI_CLASS_PEP;
  pep->fid.fid.ops = &listener_fid_ops;
  pep->fid.cm = &cm_ops;
  all.listeners[port] = pep;
  ++pep->fabric->children;
  ++all.live["pep"];
  *out = &pep->fid;
  return 0;
}

int open_av(fid_domain* fid, fi_av_attr*, fid_av** out, void*) {
  Domain* domain = of<Domain>(&fid->fid);
  const Entered entered(domain);
  auto* av = new Av;
  av->domain = domain;
  av->fid.fid.fclass = FI_CLASS_AV;
  av->fid.fid.ops = &av_fid_ops;
  av->fid.ops = &av_ops;
  ++domain->children;
  ++world().live["av"];
  *out = &av->fid;
  return 0;
}

}  // namespace fake
