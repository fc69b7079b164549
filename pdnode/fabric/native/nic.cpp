#include "nic.hpp"

#include <arpa/inet.h>
#include <netdb.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_ext.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>

#include "compat.hpp"
#include "sockets.hpp"
#include "util.hpp"

namespace pdnode {

namespace {

// Its number in libfabric 1.20 and newer; our headers are older. EFA may otherwise deliver a
// write twice and overwrite a page that decode has appended to.
constexpr int kEfaWriteInOrder = FI_OPT_EFA_RNR_RETRY + 6;

std::string memlock_advice() {
  rlimit limit = {};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  if (limit.rlim_cur == RLIM_INFINITY) return "";
  return "; RLIMIT_MEMLOCK is " + std::to_string(limit.rlim_cur) + " bytes (LimitMEMLOCK=)";
}

}  // namespace

Charge::Charge(Account* account, uint64_t bytes, uint64_t entries)
    : account_(account), bytes_(bytes), entries_(entries) {
  account_->bytes.fetch_add(bytes_);
  account_->entries.fetch_add(entries_);
  account_->registrations.fetch_add(1);
}

Charge::Charge(Charge&& other) noexcept
    : account_(std::exchange(other.account_, nullptr)),
      bytes_(other.bytes_),
      entries_(other.entries_) {}

Charge& Charge::operator=(Charge&& other) noexcept {
  if (this != &other) {
    reset();
    account_ = std::exchange(other.account_, nullptr);
    bytes_ = other.bytes_;
    entries_ = other.entries_;
  }
  return *this;
}

void Charge::reset() {
  if (account_ == nullptr) return;
  account_->bytes.fetch_sub(bytes_);
  account_->entries.fetch_sub(entries_);
  account_->registrations.fetch_sub(1);
  account_ = nullptr;
}

Error Nic::open() {
  const std::string node = provider.by_domain_name ? "" : address;
  const std::string device = provider.by_domain_name ? name : "";
  if (Error error = query(library, provider, node, "", device, device_memory, &info)) return error;
  limits = limits_of(provider, *info.get(), window);
  if (Error error = library.check(
          "fi_fabric", library.fabric(info->fabric_attr, fabric.out(), nullptr), label())) {
    return error;
  }
  if (Error error = library.check(
          "fi_domain", fi_domain(fabric.get(), info.get(), domain.out(), nullptr), label())) {
    return error;
  }
  return open_queues(true, &queues);
}

Error Nic::open_queues(bool waitable, Queues* opened) const {
  fi_cq_attr cq_attr = {};
  cq_attr.format = FI_CQ_FORMAT_DATA;
  cq_attr.size = kCompletionQueueEntries;
  cq_attr.wait_obj = waitable ? FI_WAIT_FD : FI_WAIT_NONE;
  int code = fi_cq_open(domain.get(), &cq_attr, opened->cq.out(), nullptr);
  if (code != 0 && waitable) {
    cq_attr.wait_obj = FI_WAIT_NONE;  // the thread naps instead of blocking
    code = fi_cq_open(domain.get(), &cq_attr, opened->cq.out(), nullptr);
  }
  if (Error error = library.check("fi_cq_open", code, label())) return error;
  if (cq_attr.wait_obj == FI_WAIT_FD &&
      fi_control(&opened->cq->fid, FI_GETWAIT, &opened->cq_fd) != 0) {
    opened->cq_fd = -1;
  }
  if (provider.endpoint != FI_EP_MSG) return Error();
  fi_eq_attr eq_attr = {};
  eq_attr.wait_obj = waitable ? FI_WAIT_FD : FI_WAIT_NONE;
  code = fi_eq_open(fabric.get(), &eq_attr, opened->eq.out(), nullptr);
  if (Error error = library.check("fi_eq_open", code, label())) return error;
  if (waitable && fi_control(&opened->eq->fid, FI_GETWAIT, &opened->eq_fd) != 0) {
    opened->eq_fd = -1;
  }
  return Error();
}

Error Nic::listen(const std::string& host, int port, int* bound) {
  Info local;
  if (Error error =
          query(library, provider, host, std::to_string(port), "", device_memory, &local)) {
    return error;
  }
  Fid<fid_pep> listener;
  const std::string where = " on " + host + ":" + std::to_string(port);
  // tcp binds the port here, verbs in fi_listen.
  int code = fi_passive_ep(fabric.get(), local.get(), listener.out(), nullptr);
  if (Error error = library.check("fi_passive_ep", code, label())) {
    return Error(error.text() + where);
  }
  code = fi_pep_bind(listener.get(), &queues.eq->fid, 0);
  if (Error error = library.check("fi_pep_bind", code, label())) return error;
  code = fi_listen(listener.get());
  if (Error error = library.check("fi_listen", code, label())) return Error(error.text() + where);
  sockaddr_storage name_bytes = {};
  size_t size = sizeof name_bytes;
  code = fi_getname(&listener->fid, &name_bytes, &size);
  if (Error error = library.check("fi_getname", code, label())) return error;
  const uint16_t network_port =
      name_bytes.ss_family == AF_INET6
          ? reinterpret_cast<const sockaddr_in6*>(&name_bytes)->sin6_port
          : reinterpret_cast<const sockaddr_in*>(&name_bytes)->sin_port;
  *bound = ntohs(network_port);
  listeners.push_back(std::move(listener));
  return Error();
}

size_t Nic::cut_half_open(const fid_pep& listener, const std::vector<fid_ep*>& taken) const {
  if (!provider.kernel_sockets) return 0;
  sockaddr_storage at = {};
  size_t size = sizeof at;
  if (fi_getname(const_cast<fid_t>(&listener.fid), &at, &size) != 0) return 0;
  std::vector<sockaddr_storage> peers;
  for (fid_ep* ep : taken) {
    sockaddr_storage peer = {};
    size = sizeof peer;
    if (fi_getpeer(ep, &peer, &size) == 0) peers.push_back(peer);
  }
  return cut_strangers(at, peers);
}

Error Nic::open_endpoint(fi_info* of, const Queues& on, fid_av* av, Fid<fid_ep>* endpoint) const {
  int code = fi_endpoint(domain.get(), of, endpoint->out(), nullptr);
  if (Error error = library.check("fi_endpoint", code, label())) return error;
  fid_ep* ep = endpoint->get();
  if (provider.by_domain_name) {
    bool in_order = true;  // refused by devices that cannot: then decode copies the last page
    fi_setopt(&ep->fid, FI_OPT_ENDPOINT, kEfaWriteInOrder, &in_order, sizeof in_order);
  }
  code = fi_ep_bind(ep, &on.cq->fid, FI_TRANSMIT | FI_RECV);
  if (Error error = library.check("fi_ep_bind", code, label())) return error;
  if (on.eq) {
    code = fi_ep_bind(ep, &on.eq->fid, 0);
    if (Error error = library.check("fi_ep_bind", code, label())) return error;
  }
  if (av != nullptr) {
    code = fi_ep_bind(ep, &av->fid, 0);
    if (Error error = library.check("fi_ep_bind", code, label())) return error;
  }
  return library.check("fi_enable", fi_enable(ep), label());
}

Error Nic::open_av(Fid<fid_av>* av) const {
  fi_av_attr attr = {};
  attr.type = FI_AV_TABLE;
  return library.check("fi_av_open", fi_av_open(domain.get(), &attr, av->out(), nullptr),
                       label());
}

Info Nic::info_for(const void* address_bytes, size_t size) const {
  Info copy(&library, library.dupinfo(info.get()));
  if (!copy) return copy;
  std::free(copy->dest_addr);
  copy->dest_addr = std::malloc(size);  // freed by fi_freeinfo
  copy->dest_addrlen = copy->dest_addr != nullptr ? size : 0;
  if (copy->dest_addr != nullptr) std::memcpy(copy->dest_addr, address_bytes, size);
  return copy;
}

Error Nic::register_piece(const Memory& memory, uint64_t offset, uint64_t length, uint64_t access,
                          Registration* piece) const {
  const uint64_t entries = (length + memory.memory_page_bytes - 1) / memory.memory_page_bytes;
  const std::string wanted = " for " + std::to_string(length) + " bytes with NIC " + name + ", " +
                             std::to_string(account.bytes.load()) + " bytes registered before";
  if (account.entries.load() + entries > provider.nic_entries) {
    return Error("registration: " + std::to_string(entries) + " more pages of " +
                 std::to_string(memory.memory_page_bytes) + " bytes are above the limit of " +
                 std::to_string(provider.nic_entries) + wanted + "; huge pages need fewer");
  }
  uint64_t key = random_u64();
  if (info->domain_attr->mr_key_size < 8) {
    key &= (uint64_t{1} << (8 * info->domain_attr->mr_key_size)) - 1;
  }
  const uint64_t requested = limits.provider_keys ? 0 : key;
  int code = 0;
  if (memory.dmabuf < 0) {
    code = fi_mr_reg(domain.get(), memory.data + offset, length, access, 0, requested, 0,
                     piece->mr.out(), nullptr);
  } else {
    const DmaBuf buffer = {memory.dmabuf, offset, length, memory.data};
    RegionAttributes attributes = {};
    attributes.dmabuf = &buffer;
    attributes.count = 1;
    attributes.access = access;
    attributes.requested_key = requested;
    attributes.interface = FI_HMEM_CUDA;
    attributes.device = memory.device;
    code = fi_mr_regattr(domain.get(), reinterpret_cast<const fi_mr_attr*>(&attributes),
                         kDmaBufFlag, piece->mr.out());
  }
  if (Error error = library.check("fi_mr_reg", code, label())) {
    return Error(error.text() + wanted + (code == -FI_ENOMEM ? memlock_advice() : ""));
  }
  piece->offset = offset;
  piece->length = length;
  piece->key = fi_mr_key(piece->mr.get());
  piece->base = limits.virtual_addresses ? reinterpret_cast<uint64_t>(memory.data + offset) : 0;
  piece->charge = Charge(&account, length, entries);
  return Error();
}

Error Nic::register_all(const Memory& memory, uint64_t access,
                        std::vector<Registration>* pieces) const {
  const uint64_t most = provider.piece_entries * memory.memory_page_bytes;
  // Cut where neither a page of ours nor one of the kernel's is cut: that one would count twice.
  const uint64_t unit = std::lcm(memory.page_bytes, memory.memory_page_bytes);
  const uint64_t step = unit <= most ? most / unit * unit : most / memory.page_bytes * memory.page_bytes;
  if (step == 0) {
    return Error("page_bytes: " + std::to_string(memory.page_bytes) + " is above the limit of " +
                 std::to_string(most) + " a registration [" + label() + "]");
  }
  for (uint64_t offset = 0; offset < memory.size; offset += step) {
    Registration piece;
    const uint64_t length = std::min(memory.size - offset, step);
    if (Error error = register_piece(memory, offset, length, access, &piece)) return error;
    pieces->push_back(std::move(piece));
  }
  return Error();
}

Error parse_endpoint(const std::string& text, std::vector<uint8_t>* address) {
  const size_t colon = text.rfind(':');
  std::string host = colon == std::string::npos ? "" : text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  addrinfo hints = {};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (host.empty() ||
      getaddrinfo(host.c_str(), text.c_str() + colon + 1, &hints, &found) != 0) {
    return Error("endpoint: '" + text + "' is not numeric host:port");
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(found->ai_addr);
  address->assign(bytes, bytes + found->ai_addrlen);
  freeaddrinfo(found);
  return Error();
}

}  // namespace pdnode
