// The bare loop that `pdnode bench transfer` compares the core with: what libfabric itself gives.
// The sender writes pages with the core's flags and keeps a window of operations outstanding. Calls
// return 0 or more, or a negative libfabric code, and raw_failed() names the operation.

#include <dlfcn.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const uint64_t FLAGS = FI_COMPLETION | FI_REMOTE_CQ_DATA | FI_DELIVERY_COMPLETE;
enum { SEGMENTS = 4, MAX_WINDOW = 256, BATCH = 64, SPINS_PER_CLOCK = 4096 };
static const int64_t PATIENCE_NS = 60000000000;

struct raw {
  __typeof__(&fi_dupinfo) dupinfo;
  __typeof__(&fi_freeinfo) freeinfo;
  struct fi_info *info;
  struct fid_fabric *fabric;
  struct fid_domain *domain;
  struct fid_cq *cq;
  struct fid_eq *eq;  // MSG
  struct fid_av *av;  // RDM
  struct fid_pep *pep;
  struct fid_ep *ep;
  struct fid_mr *mr;
  fi_addr_t peer;
  uint8_t *memory;
  int shares_core;  // with the loops of other NICs: gives way when there is nothing to do
  const char *failed;
  struct fi_context2 contexts[MAX_WINDOW];
  uint32_t idle[MAX_WINDOW];  // contexts that are not in use
};

#define TRY(call)                                     \
  do {                                                \
    const int code_ = (int)(call);                    \
    if (code_ < 0) return raw->failed = #call, code_; \
  } while (0)

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}
const char *raw_failed(const struct raw *raw) { return raw->failed ? raw->failed : "nothing"; }
void raw_share_core(struct raw *raw) { raw->shares_core = 1; }
struct raw *raw_new(void) { return calloc(1, sizeof(struct raw)); }

static int open_endpoint(struct raw *raw, struct fi_info *info) {
  TRY(fi_endpoint(raw->domain, info, &raw->ep, NULL));
  TRY(fi_ep_bind(raw->ep, raw->eq ? &raw->eq->fid : &raw->av->fid, 0));
  TRY(fi_ep_bind(raw->ep, &raw->cq->fid, FI_TRANSMIT | FI_RECV));
  TRY(fi_enable(raw->ep));
  return 0;
}

// Opens one NIC and registers `size` bytes at `memory` for remote writes under `key`.
int raw_open(struct raw *raw, const char *library, const char *provider, int rdm,
             const char *host, uint8_t *memory, uint64_t size, uint64_t key) {
  void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  TRY(handle ? 0 : -FI_ENOENT);
  __typeof__(&fi_getinfo) getinfo = dlsym(handle, "fi_getinfo");
  __typeof__(&fi_fabric) fabric = dlsym(handle, "fi_fabric");
  raw->dupinfo = dlsym(handle, "fi_dupinfo");
  raw->freeinfo = dlsym(handle, "fi_freeinfo");
  TRY(getinfo && fabric && raw->dupinfo && raw->freeinfo ? 0 : -FI_ENOSYS);
  struct fi_info *hints = raw->dupinfo(NULL);
  TRY(hints ? 0 : -FI_ENOMEM);
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = rdm ? FI_EP_RDM : FI_EP_MSG;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->fabric_attr->prov_name = strdup(provider);
  const int found = getinfo(FI_VERSION(1, 18), host, NULL, FI_SOURCE, hints, &raw->info);
  raw->freeinfo(hints);
  TRY(found);
  TRY(fabric(raw->info->fabric_attr, &raw->fabric, NULL));
  TRY(fi_domain(raw->fabric, raw->info, &raw->domain, NULL));
  struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_DATA, .size = 16384, .wait_obj = FI_WAIT_NONE};
  TRY(fi_cq_open(raw->domain, &cq, &raw->cq, NULL));
  TRY(fi_mr_reg(raw->domain, memory, size, FI_WRITE | FI_REMOTE_WRITE, 0, key, 0, &raw->mr, NULL));
  raw->memory = memory;
  raw->peer = FI_ADDR_UNSPEC;
  struct fi_av_attr av = {.type = FI_AV_TABLE};
  struct fi_eq_attr eq = {.wait_obj = FI_WAIT_UNSPEC};
  if (!rdm) TRY(fi_eq_open(raw->fabric, &eq, &raw->eq, NULL));
  if (rdm) TRY(fi_av_open(raw->domain, &av, &raw->av, NULL));
  return rdm ? open_endpoint(raw, raw->info) : 0;
}

// This end's address: of the endpoint (RDM), or of a listener that it opens (MSG).
int raw_address(struct raw *raw, void *address, size_t *size) {
  if (!raw->ep) {
    TRY(fi_passive_ep(raw->fabric, raw->info, &raw->pep, NULL));
    TRY(fi_pep_bind(raw->pep, &raw->eq->fid, 0));
    TRY(fi_listen(raw->pep));
  }
  TRY(fi_getname(raw->ep ? &raw->ep->fid : &raw->pep->fid, address, size));
  return 0;
}

// Waits for one event; the other ones are errors.
static int await(struct raw *raw, uint32_t wanted, struct fi_eq_cm_entry *entry) {
  uint32_t event = 0;
  TRY(fi_eq_sread(raw->eq, &event, entry, sizeof *entry, 10000, 0));
  return event == wanted ? 0 : -FI_EOTHER;
}

int raw_accept(struct raw *raw) {
  struct fi_eq_cm_entry entry;
  TRY(await(raw, FI_CONNREQ, &entry));
  const int opened = open_endpoint(raw, entry.info);
  raw->freeinfo(entry.info);
  if (opened < 0) return opened;
  TRY(fi_accept(raw->ep, NULL, 0));
  TRY(await(raw, FI_CONNECTED, &entry));
  return 0;
}

int raw_connect(struct raw *raw, const void *address, size_t size) {
  struct fi_eq_cm_entry entry;
  if (raw->av) return fi_av_insert(raw->av, address, 1, &raw->peer, 0, NULL) == 1 ? 0 : -FI_EINVAL;
  free(raw->info->dest_addr);
  raw->info->dest_addr = malloc(size);
  raw->info->dest_addrlen = size;
  memcpy(raw->info->dest_addr, address, size);
  TRY(open_endpoint(raw, raw->info));
  TRY(fi_connect(raw->ep, address, NULL, 0));
  TRY(await(raw, FI_CONNECTED, &entry));
  return 0;
}

// Writes `count` pages, from source[i] to target[i], `passes` times; `gather` pages an operation,
// the number of them as the immediate. Nanoseconds from the first post to the last completion.
int64_t raw_send(struct raw *raw, uint64_t key, const uint32_t *source, const uint32_t *target,
                 uint32_t count, uint32_t passes, uint64_t page_bytes, uint32_t window,
                 uint32_t gather) {
  if (window < 1 || window > MAX_WINDOW || gather < 1 || gather > SEGMENTS) return -FI_EINVAL;
  struct fi_cq_data_entry entries[BATCH];
  uint32_t free_contexts = window, next = 0;
  for (uint32_t i = 0; i < window; ++i) raw->idle[i] = i;
  const int64_t begin = now_ns();
  for (uint64_t spins = 0; passes > 0 || free_contexts < window; ++spins) {
    while (passes > 0 && free_contexts > 0) {
      struct iovec from[SEGMENTS];
      struct fi_rma_iov to[SEGMENTS];
      const uint32_t pages = count - next < gather ? count - next : gather;
      for (uint32_t i = 0; i < pages; ++i) {
        from[i] = (struct iovec){raw->memory + source[next + i] * page_bytes, page_bytes};
        to[i] = (struct fi_rma_iov){target[next + i] * page_bytes, page_bytes, key};
      }
      struct fi_context2 *context = &raw->contexts[raw->idle[free_contexts - 1]];
      struct fi_msg_rma message = {from, NULL, pages, raw->peer, to, pages, context, pages};
      const ssize_t code = fi_writemsg(raw->ep, &message, FLAGS);
      if (code == -FI_EAGAIN) break;
      TRY(code);
      --free_contexts;
      next = (next + pages) % count;
      if (next == 0) --passes;
    }
    const ssize_t read = fi_cq_read(raw->cq, entries, BATCH);
    if (read < 0 && read != -FI_EAGAIN) TRY(read);
    if (read < 0 && raw->shares_core) sched_yield();
    for (ssize_t i = 0; i < read; ++i) {
      raw->idle[free_contexts++] = (struct fi_context2 *)entries[i].op_context - raw->contexts;
    }
    if (spins % SPINS_PER_CLOCK == 0 && now_ns() - begin > PATIENCE_NS) TRY(-FI_ETIMEDOUT);
  }
  return now_ns() - begin;
}

// Polls until immediates of `units` pages have arrived.
int raw_receive(struct raw *raw, uint64_t units) {
  struct fi_cq_data_entry entries[BATCH];
  const int64_t begin = now_ns();
  for (uint64_t spins = 0, seen = 0; seen < units; ++spins) {
    const ssize_t read = fi_cq_read(raw->cq, entries, BATCH);
    if (read < 0 && read != -FI_EAGAIN) TRY(read);
    if (read < 0 && raw->shares_core) sched_yield();
    for (ssize_t i = 0; i < read; ++i) seen += entries[i].data;
    if (spins % SPINS_PER_CLOCK == 0 && now_ns() - begin > PATIENCE_NS) TRY(-FI_ETIMEDOUT);
  }
  return 0;
}

void raw_close(struct raw *raw) {
  // In this order: what is bound before what it is bound to.
  void *const opened[] = {raw->ep, raw->pep, raw->mr, raw->av, raw->cq, raw->eq, raw->domain,
                          raw->fabric};
  for (size_t i = 0; i < sizeof opened / sizeof *opened; ++i) {
    if (opened[i]) fi_close(opened[i]);  // every object begins with its fid
  }
  if (raw->info) raw->freeinfo(raw->info);
  free(raw);
}
