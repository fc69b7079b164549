// Fabric, domain, registrations, queues: opening, reading, closing in order.

#include <fcntl.h>
#include <rdma/fi_errno.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "fake.hpp"

namespace fake {

namespace {

template <class T>
T* of(fid_t fid) {
  return reinterpret_cast<T*>(fid);  // every object starts with its fid
}

int refuse_close(const char* what, int users) {
  world().violation(std::string(what) + " closed with " + std::to_string(users) + " users");
  return -FI_EBUSY;
}

// ---- registrations

int close_region(fid_t fid) {
  Mr* mr = of<Mr>(fid);
  const Entered entered(mr->domain);
  mr->domain->regions.erase(mr->fid.key);
  mr->domain->registered_bytes -= static_cast<int64_t>(mr->length);
  --mr->domain->children;
  --world().live["mr"];
  delete mr;
  return World::use(&world().rules.close_fails_next) ? -FI_EBUSY : 0;
}

fi_ops region_ops = {sizeof(fi_ops), close_region, nullptr, nullptr, nullptr, nullptr, nullptr};

bool registrations_held() {
  const Entered entered;
  const bool held = world().rules.hold_registrations != 0;
  if (held) ++world().counts["waiting"];
  return held;
}

int add_region(Domain* domain, const void* buffer, size_t length, uint64_t access,
               uint64_t requested_key, fid_mr** out,
               const std::shared_ptr<uint8_t>& window = nullptr, uint64_t offset = 0) {
  if (const int64_t pause = world().rules.register_us) {
    std::this_thread::sleep_for(std::chrono::microseconds(pause));
  }
  for (int ms = 0; registrations_held(); ++ms) {
    if (ms == 10'000) return -FI_ETIMEDOUT;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const Entered entered(domain);
  World& all = world();
  if (static_cast<int64_t>(length) > all.rules.region_bytes) return -FI_EINVAL;
  if (domain->registered_bytes + static_cast<int64_t>(length) > all.rules.nic_bytes) {
    return -FI_ENOMEM;
  }
  uint64_t key = requested_key;
  if (all.rules.provider_keys != 0) {
    do {
      key = all.chance() & 0xffffffff;
    } while (key == 0 || domain->regions.count(key) != 0);
  } else if (domain->regions.count(key) != 0) {
    return -FI_ENOKEY;
  }
  auto* mr = new Mr;
  mr->domain = domain;
  mr->base = const_cast<uint8_t*>(static_cast<const uint8_t*>(buffer));
  mr->data = window != nullptr ? window.get() + offset : mr->base;
  mr->window = window;
  mr->length = length;
  mr->access = access;
  mr->fid.fid.fclass = FI_CLASS_MR;
  mr->fid.fid.ops = &region_ops;
  mr->fid.key = key;
  mr->fid.mem_desc = mr;
  domain->regions[key] = mr;
  domain->registered_bytes += static_cast<int64_t>(length);
  ++domain->children;
  ++all.live["mr"];
  ++all.counts["registrations"];
  *out = &mr->fid;
  return 0;
}

int register_memory(struct fid* fid, const void* buffer, size_t length, uint64_t access, uint64_t,
                    uint64_t requested_key, uint64_t, fid_mr** out, void*) {
  return add_region(of<Domain>(fid), buffer, length, access, requested_key, out);
}

// What a library of 1.20 reads, by its own description: fi_mr_attr begins with a pointer to the
// dma-buf, whose fields are a descriptor, an offset, a length and the address of its start.
struct DmaBufLayout {
  int fd;
  uint64_t offset;
  size_t length;
  uint8_t* base;
};
struct AttributesLayout {
  const DmaBufLayout* buffer;
  size_t count;
  uint64_t access, offset, requested_key;
  void* context;
  size_t auth_key_size;
  uint8_t* auth_key;
  int interface;
  uint64_t device;
  void* since_1_20[4];
};

// Like a NIC, by the descriptor: the place where the caller has it mapped may be out of reach.
std::shared_ptr<uint8_t> map_window(int fd, size_t size) {
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return nullptr;
  return {static_cast<uint8_t*>(data), [size](uint8_t* at) { munmap(at, size); }};
}

// The stub of the CUDA driver writes the device into its memory's name; -1 for other memory.
int device_of(int fd) {
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  std::array<char, 256> name{};
  int device = -1;
  if (readlink(link.c_str(), name.data(), name.size() - 1) < 0) return -1;
  return std::sscanf(name.data(), "/memfd:stub-cuda:%d:", &device) == 1 ? device : -1;
}

int register_by_attributes(struct fid* fid, const fi_mr_attr* raw, uint64_t flags, fid_mr** out) {
  constexpr uint64_t kDmaBuf = uint64_t{1} << 40;
  Domain* domain = of<Domain>(fid);
  const auto& attributes = *reinterpret_cast<const AttributesLayout*>(raw);
  {
    const Entered entered(domain);
    World& all = world();
    ++all.counts["by_attributes"];
    if (FI_VERSION_LT(domain->fabric->api, FI_VERSION(1, 20))) {
      all.violation("a dma-buf for an API below 1.20");
    }
    for (const void* newer : attributes.since_1_20) {
      if (newer != nullptr) all.violation("fi_mr_attr is not 0 at its end");
    }
    if (flags != kDmaBuf || attributes.count != 1 || attributes.offset != 0) return -FI_EINVAL;
    if (fcntl(attributes.buffer->fd, F_GETFD) < 0) return -FI_EBADF;
    if (!domain->device_memory) all.violation("memory of a device without FI_HMEM");
    if (attributes.interface != FI_HMEM_CUDA) all.violation("a dma-buf of another interface");
    const int device = device_of(attributes.buffer->fd);
    if (device >= 0 && attributes.device != static_cast<uint64_t>(device)) {
      all.violation("memory of device " + std::to_string(device) + " registered as of " +
                    std::to_string(attributes.device));
    }
  }
  const DmaBufLayout& buffer = *attributes.buffer;
  const auto window = map_window(buffer.fd, buffer.offset + buffer.length);
  if (window == nullptr) return -FI_EINVAL;
  return add_region(domain, buffer.base + buffer.offset, buffer.length, attributes.access,
                    attributes.requested_key, out, window, buffer.offset);
}

// ---- completion queues

int close_cq(fid_t fid) {
  Cq* cq = of<Cq>(fid);
  const Entered entered(cq->domain);
  if (cq->users != 0) return refuse_close("a completion queue", cq->users);
  if (cq->fd >= 0) ::close(cq->fd);
  --cq->domain->children;
  --world().live["cq"];
  delete cq;
  return 0;
}

int control_wait(fid_t, int fd, int command, void* argument) {
  if (command != FI_GETWAIT || fd < 0) return -FI_ENOSYS;
  *static_cast<int*>(argument) = fd;
  return 0;
}

int control_cq(fid_t fid, int command, void* argument) {
  return control_wait(fid, of<Cq>(fid)->fd, command, argument);
}

fi_ops cq_fid_ops = {sizeof(fi_ops), close_cq, nullptr, control_cq, nullptr, nullptr, nullptr};

bool has_writes(const Cq& cq) {
  const auto& all = world().endpoints;
  return std::any_of(all.begin(), all.end(), [&cq](const auto& one) {
    return one.second->cq == &cq && one.second->flying > 0;
  });
}

ssize_t read_cq(fid_cq* fid, void* buffer, size_t count) {
  Cq* cq = of<Cq>(&fid->fid);
  const Entered entered(cq->domain);
  World& all = world();
  if (all.rules.break_queue != 0 && has_writes(*cq)) {
    all.rules.break_queue = 0;
    cq->broken = true;
  }
  if (cq->broken) return -FI_EIO;
  progress(cq->domain);
  if (cq->entries.empty()) {
    if (cq->fd >= 0 && all.rules.never_blocks == 0 && !pending_for(cq->domain)) drain_fd(cq->fd);
    return -FI_EAGAIN;
  }
  if (all.roll(all.rules.again_permille)) return -FI_EAGAIN;
  auto* entries = static_cast<fi_cq_data_entry*>(buffer);
  size_t taken = 0;
  while (taken < count && !cq->entries.empty() && cq->entries.front().error == 0) {
    const Completion& one = cq->entries.front();
    fi_cq_data_entry& entry = entries[taken++];
    entry = {};
    entry.op_context = one.context;
    entry.flags = one.flags;
    entry.data = one.data;
    cq->entries.pop_front();
  }
  return taken > 0 ? static_cast<ssize_t>(taken) : -FI_EAVAIL;
}

ssize_t read_cq_error(fid_cq* fid, fi_cq_err_entry* entry, uint64_t) {
  Cq* cq = of<Cq>(&fid->fid);
  const Entered entered(cq->domain);
  if (cq->entries.empty() || cq->entries.front().error == 0) return -FI_EAGAIN;
  const Completion& one = cq->entries.front();
  entry->op_context = one.context;
  entry->flags = one.flags;
  entry->data = one.data;
  entry->err = one.error;
  entry->prov_errno = 7000 + one.error;
  cq->entries.pop_front();
  return 1;
}

fi_ops_cq cq_ops = {sizeof(fi_ops_cq), read_cq, nullptr, read_cq_error,
                    nullptr,           nullptr, nullptr, nullptr};

int open_cq(fid_domain* fid, fi_cq_attr* attr, fid_cq** out, void*) {
  Domain* domain = of<Domain>(&fid->fid);
  const Entered entered(domain);
  const Rules& rules = world().rules;
  if (attr->format != FI_CQ_FORMAT_DATA) return -FI_ENOSYS;
  if (attr->wait_obj != FI_WAIT_NONE && rules.wait_fd == 0) return -FI_ENOSYS;
  auto* cq = new Cq;
  cq->domain = domain;
  if (attr->wait_obj == FI_WAIT_FD) {
    cq->fd = eventfd(rules.never_blocks != 0 ? 1 : 0, EFD_CLOEXEC | EFD_NONBLOCK);
  }
  cq->fid.fid.fclass = FI_CLASS_CQ;
  cq->fid.fid.ops = &cq_fid_ops;
  cq->fid.ops = &cq_ops;
  ++domain->children;
  ++world().live["cq"];
  *out = &cq->fid;
  return 0;
}

// ---- event queues

int close_eq(fid_t fid) {
  Eq* eq = of<Eq>(fid);
  const Entered entered;
  if (eq->users != 0) return refuse_close("an event queue", eq->users);
  for (const Event& event : eq->events) {
    if (event.info != nullptr) {
      delete reinterpret_cast<Request*>(event.info->handle);
      freeinfo(event.info);
    }
  }
  if (eq->fd >= 0) ::close(eq->fd);
  --eq->fabric->children;
  --world().live["eq"];
  delete eq;
  return 0;
}

int control_eq(fid_t fid, int command, void* argument) {
  return control_wait(fid, of<Eq>(fid)->fd, command, argument);
}

fi_ops eq_fid_ops = {sizeof(fi_ops), close_eq, nullptr, control_eq, nullptr, nullptr, nullptr};

ssize_t read_eq(fid_eq* fid, uint32_t* kind, void* buffer, size_t length, uint64_t) {
  Eq* eq = of<Eq>(&fid->fid);
  const Entered entered;
  const bool never_blocks = world().rules.never_blocks != 0;
  if (!eq->events.empty() && eq->events.front().delay-- > 0) return -FI_EAGAIN;
  if (eq->events.empty()) {
    if (eq->fd >= 0 && !never_blocks) drain_fd(eq->fd);
    return -FI_EAGAIN;
  }
  Event& event = eq->events.front();
  if (event.kind == 0) return -FI_EAVAIL;
  auto* entry = static_cast<fi_eq_cm_entry*>(buffer);
  const size_t size = std::min(event.data.size(), length - sizeof *entry);
  entry->fid = event.of;
  entry->info = event.info;
  std::memcpy(entry->data, event.data.data(), size);
  *kind = event.kind;
  eq->events.pop_front();
  return static_cast<ssize_t>(sizeof *entry + size);
}

ssize_t read_eq_error(fid_eq* fid, fi_eq_err_entry* entry, uint64_t) {
  Eq* eq = of<Eq>(&fid->fid);
  const Entered entered;
  if (eq->events.empty() || eq->events.front().kind != 0) return -FI_EAGAIN;
  entry->fid = eq->events.front().of;
  entry->err = eq->events.front().error;
  eq->events.pop_front();
  return 1;
}

fi_ops_eq eq_ops = {sizeof(fi_ops_eq), read_eq, read_eq_error, nullptr, nullptr, nullptr};

int open_eq(fid_fabric* fid, fi_eq_attr* attr, fid_eq** out, void*) {
  const Entered entered;
  auto* eq = new Eq;
  eq->fabric = of<Fabric>(&fid->fid);
  if (attr->wait_obj == FI_WAIT_FD) {
    eq->fd = eventfd(world().rules.never_blocks != 0 ? 1 : 0, EFD_CLOEXEC | EFD_NONBLOCK);
  }
  eq->fid.fid.fclass = FI_CLASS_EQ;
  eq->fid.fid.ops = &eq_fid_ops;
  eq->fid.ops = &eq_ops;
  ++eq->fabric->children;
  ++world().live["eq"];
  *out = &eq->fid;
  return 0;
}

// ---- domain and fabric

int close_domain(fid_t fid) {
  Domain* domain = of<Domain>(fid);
  const Entered entered;
  if (domain->children != 0) return refuse_close("a domain", domain->children);
  --domain->fabric->children;
  --world().live["domain"];
  delete domain;
  return 0;
}

int close_fabric(fid_t fid) {
  const Entered entered;
  Fabric* fabric = of<Fabric>(fid);
  if (fabric->children != 0) return refuse_close("a fabric", fabric->children);
  --world().live["fabric"];
  delete fabric;
  return 0;
}

fi_ops domain_fid_ops = {sizeof(fi_ops), close_domain, nullptr, nullptr,
                         nullptr,        nullptr,      nullptr};
fi_ops fabric_fid_ops = {sizeof(fi_ops), close_fabric, nullptr, nullptr,
                         nullptr,        nullptr,      nullptr};
fi_ops_mr mr_ops = {sizeof(fi_ops_mr), register_memory, nullptr, register_by_attributes};
fi_ops_domain domain_ops = [] {
  fi_ops_domain ops = {};
  ops.size = sizeof ops;
  ops.av_open = open_av;
  ops.cq_open = open_cq;
  ops.endpoint = open_endpoint;
  return ops;
}();

int open_domain(fid_fabric* fid, fi_info* info, fid_domain** out, void*) {
  const Entered entered;
  auto* domain = new Domain;
  domain->fabric = of<Fabric>(&fid->fid);
  domain->device_memory = (info->caps & FI_HMEM) != 0;
  domain->one_thread = info->domain_attr->threading == FI_THREAD_DOMAIN;
  domain->fabric->api = info->fabric_attr->api_version;
  domain->fid.fid.fclass = FI_CLASS_DOMAIN;
  domain->fid.fid.ops = &domain_fid_ops;
  domain->fid.ops = &domain_ops;
  domain->fid.mr = &mr_ops;
  ++domain->fabric->children;
  ++world().live["domain"];
  *out = &domain->fid;
  return 0;
}

int try_wait(fid_fabric*, struct fid** fids, int count) {
  const Entered entered;
  if (world().rules.never_blocks != 0) return 0;
  for (int i = 0; i < count; ++i) {
    if (fids[i]->fclass == FI_CLASS_CQ) {
      Cq* cq = of<Cq>(fids[i]);
      if (!cq->entries.empty() || pending_for(cq->domain)) return -FI_EAGAIN;
    } else if (!of<Eq>(fids[i])->events.empty()) {
      return -FI_EAGAIN;
    }
  }
  return 0;
}

fi_ops_fabric fabric_ops = [] {
  fi_ops_fabric ops = {};
  ops.size = sizeof ops;
  ops.domain = open_domain;
  ops.passive_ep = open_listener;
  ops.eq_open = open_eq;
  ops.trywait = try_wait;
  return ops;
}();

}  // namespace

Entered::Entered(Domain* domain) : lock_(world().mutex) {
  if (domain == nullptr || !domain->one_thread) return;
  // One thread opens and tests, another one owns it from then on, the first closes.
  const std::thread::id self = std::this_thread::get_id();
  if (domain->opened_by == std::thread::id()) domain->opened_by = self;
  if (self == domain->opened_by) return;
  if (domain->inside == std::thread::id()) domain->inside = self;
  if (domain->inside != self) {
    world().violation("a domain of FI_THREAD_DOMAIN is used by a third thread");
  }
}

int open_fabric(fi_fabric_attr*, fid_fabric** out, void*) {
  const Entered entered;
  auto* fabric = new Fabric;
  fabric->fid.fid.fclass = FI_CLASS_FABRIC;
  fabric->fid.fid.ops = &fabric_fid_ops;
  fabric->fid.ops = &fabric_ops;
  ++world().live["fabric"];
  *out = &fabric->fid;
  return 0;
}

void signal_fd(int fd) {
  const uint64_t one = 1;
  if (fd >= 0 && ::write(fd, &one, sizeof one) < 0) world().violation("a wait fd is full");
}

void drain_fd(int fd) {
  uint64_t value = 0;
  while (::read(fd, &value, sizeof value) > 0) {
  }
}

}  // namespace fake
