// What the fake says about itself, its personalities, and the symbols that a caller loads.

#include <arpa/inet.h>
#include <rdma/fi_errno.h>

#include <cstdlib>
#include <cstring>

#include "fake.hpp"

namespace fake {

namespace {

const struct {
  const char* name;
  int64_t Rules::*rule;
} kRules[] = {
    {"segments", &Rules::segments},
    {"provider_keys", &Rules::provider_keys},
    {"virtual_addresses", &Rules::virtual_addresses},
    {"local_registration", &Rules::local_registration},
    {"posts_receives", &Rules::posts_receives},
    {"data_bytes", &Rules::data_bytes},
    {"message_bytes", &Rules::message_bytes},
    {"window", &Rules::window},
    {"unordered", &Rules::unordered},
    {"target_progress", &Rules::target_progress},
    {"both_addresses", &Rules::both_addresses},
    {"honours_delivery", &Rules::honours_delivery},
    {"writes_twice", &Rules::writes_twice},
    {"order_option", &Rules::order_option},
    {"cancels_at_close", &Rules::cancels_at_close},
    {"pads_data", &Rules::pads_data},
    {"data_limit", &Rules::data_limit},
    {"wait_fd", &Rules::wait_fd},
    {"never_blocks", &Rules::never_blocks},
    {"region_bytes", &Rules::region_bytes},
    {"nic_bytes", &Rules::nic_bytes},
    {"register_us", &Rules::register_us},
    {"hold_registrations", &Rules::hold_registrations},
    {"again_permille", &Rules::again_permille},
    {"again_always", &Rules::again_always},
    {"fail_next", &Rules::fail_next},
    {"fail_lands", &Rules::fail_lands},
    {"lose_next", &Rules::lose_next},
    {"swallow_next", &Rules::swallow_next},
    {"repeat_next", &Rules::repeat_next},
    {"never_connects", &Rules::never_connects},
    {"hold", &Rules::hold},
    {"land_next", &Rules::land_next},
    {"holds_more", &Rules::holds_more},
    {"refuse_after_more", &Rules::refuse_after_more},
    {"refuse_receives", &Rules::refuse_receives},
    {"no_accept_next", &Rules::no_accept_next},
    {"close_fails_next", &Rules::close_fails_next},
    {"break_queue", &Rules::break_queue},
};

char* copy_of(const char* text) { return text != nullptr ? strdup(text) : nullptr; }

void* copy_of(const void* data, size_t size) {
  if (data == nullptr || size == 0) return nullptr;
  void* copy = std::malloc(size);
  std::memcpy(copy, data, size);
  return copy;
}

template <class T>
T* attributes(const T* from) {
  auto* copy = static_cast<T*>(std::calloc(1, sizeof(T)));
  if (from != nullptr) *copy = *from;
  return copy;
}

// The provider's answer; `layered` and `short_data` are the ones that the caller must pass over.
fi_info* answer(uint32_t version, const fi_info& hints, const char* node, const char* service) {
  const Rules& rules = world().rules;
  fi_info* info = dupinfo(nullptr);
  info->caps = FI_MSG | FI_RMA | FI_LOCAL_COMM | FI_REMOTE_COMM | (hints.caps & FI_HMEM);
  info->mode = rules.posts_receives != 0 ? FI_RX_CQ_DATA : 0;
  info->addr_format = FI_SOCKADDR_IN;
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  inet_pton(AF_INET, node != nullptr ? node : "127.0.0.1", &address.sin_addr);
  address.sin_port = htons(static_cast<uint16_t>(service != nullptr ? std::atoi(service) : 0));
  info->src_addr = copy_of(&address, sizeof address);
  info->src_addrlen = sizeof address;
  info->ep_attr->type = hints.ep_attr->type;
  info->ep_attr->max_msg_size = static_cast<size_t>(rules.message_bytes);
  info->tx_attr->size = static_cast<size_t>(rules.window);
  info->tx_attr->iov_limit = static_cast<size_t>(rules.segments);
  info->tx_attr->rma_iov_limit = static_cast<size_t>(rules.segments);
  info->rx_attr->size = 1024;
  fi_domain_attr& domain = *info->domain_attr;
  domain.name = copy_of(hints.domain_attr->name != nullptr ? hints.domain_attr->name : "fake0");
  domain.threading = hints.domain_attr->threading;
  domain.control_progress = domain.data_progress = FI_PROGRESS_MANUAL;
  domain.mr_mode = (rules.provider_keys != 0 ? FI_MR_PROV_KEY : 0) |
                   (rules.virtual_addresses != 0 ? FI_MR_VIRT_ADDR : 0) |
                   (rules.local_registration != 0 ? FI_MR_LOCAL : 0) | FI_MR_ALLOCATED |
                   ((hints.caps & FI_HMEM) != 0 ? FI_MR_HMEM : 0);
  domain.mr_key_size = rules.provider_keys != 0 ? 4 : 8;
  domain.cq_data_size = static_cast<size_t>(rules.data_bytes);
  domain.mr_cnt = 65536;
  info->fabric_attr->prov_name = copy_of(hints.fabric_attr->prov_name);
  info->fabric_attr->name = copy_of("fake");
  info->fabric_attr->api_version = version;
  return info;
}

}  // namespace

World& world() {
  static World* one = new World;  // never destroyed: threads may outlive main
  return *one;
}

void World::violation(const std::string& what) {
  if (violations.size() < 5) violations.push_back(what);
}

fi_info* dupinfo(const fi_info* from) {
  fi_info* info = attributes(from);
  info->next = nullptr;
  info->tx_attr = attributes(from != nullptr ? from->tx_attr : nullptr);
  info->rx_attr = attributes(from != nullptr ? from->rx_attr : nullptr);
  info->ep_attr = attributes(from != nullptr ? from->ep_attr : nullptr);
  info->domain_attr = attributes(from != nullptr ? from->domain_attr : nullptr);
  info->fabric_attr = attributes(from != nullptr ? from->fabric_attr : nullptr);
  if (from == nullptr) return info;
  info->src_addr = copy_of(from->src_addr, from->src_addrlen);
  info->dest_addr = copy_of(from->dest_addr, from->dest_addrlen);
  info->domain_attr->name = copy_of(from->domain_attr->name);
  info->fabric_attr->name = copy_of(from->fabric_attr->name);
  info->fabric_attr->prov_name = copy_of(from->fabric_attr->prov_name);
  return info;
}

void freeinfo(fi_info* info) {
  while (info != nullptr) {
    fi_info* next = info->next;
    std::free(info->src_addr);
    std::free(info->dest_addr);
    std::free(info->domain_attr->name);
    std::free(info->fabric_attr->name);
    std::free(info->fabric_attr->prov_name);
    std::free(info->tx_attr);
    std::free(info->rx_attr);
    std::free(info->ep_attr);
    std::free(info->domain_attr);
    std::free(info->fabric_attr);
    std::free(info);
    info = next;
  }
}

int getinfo(uint32_t version, const char* node, const char* service, uint64_t,
            const fi_info* hints, fi_info** info) {
  const Entered entered;
  const Rules& rules = world().rules;
  const char* wanted = hints->fabric_attr->prov_name;
  const std::string& own = world().personality;
  const bool known = own == "worse" ? std::strcmp(wanted, "tcp") == 0 : own == wanted;
  const fi_ep_type type = hints->ep_attr->type;
  if (!known || (own == "efa" && type != FI_EP_RDM) || (own == "verbs" && type != FI_EP_MSG)) {
    return -FI_ENODATA;
  }
  if (FI_VERSION_LT(fi_version(), version)) return -FI_ENOSYS;
  if ((hints->caps & FI_HMEM) != 0) ++world().counts["hmem"];
  // verbs knows no delivery completion: asked for in general, it is removed from the answer.
  if (rules.honours_delivery == 0 && (hints->tx_attr->op_flags & FI_DELIVERY_COMPLETE) != 0) {
    return -FI_ENODATA;
  }
  fi_info* right = answer(version, *hints, node, service);
  if ((right->domain_attr->mr_mode & ~hints->domain_attr->mr_mode) != 0) {
    freeinfo(right);
    return -FI_ENODATA;
  }
  if ((hints->mode & FI_RX_CQ_DATA) == 0 && rules.posts_receives != 0) {
    right->mode = 0;
    right->domain_attr->cq_data_size = 0;
  }
  fi_info* layered = dupinfo(right);
  std::free(layered->fabric_attr->prov_name);
  layered->fabric_attr->prov_name = strdup((std::string(wanted) + ";ofi_rxm").c_str());
  fi_info* short_data = dupinfo(right);
  short_data->domain_attr->cq_data_size = 0;
  layered->next = short_data;
  short_data->next = right;
  *info = layered;
  return 0;
}

void set_personality(const std::string& name) {
  World& all = world();
  Rules rules;
  if (name == "efa") {
    rules.unordered = rules.both_addresses = rules.writes_twice = 1;
    rules.wait_fd = 0;
    rules.region_bytes = int64_t{4} << 30;
    rules.nic_bytes = int64_t{95} << 30;
  } else if (name == "verbs") {
    rules.posts_receives = 1;
    rules.honours_delivery = rules.cancels_at_close = 0;
    rules.pads_data = 1;
    rules.data_limit = 55;
  } else {
    rules.segments = 4;
    rules.unordered = rules.target_progress = rules.posts_receives = rules.both_addresses = 1;
    rules.writes_twice = 0;
    rules.again_permille = 300;
    rules.window = 80;
    rules.pads_data = rules.never_blocks = 1;
    rules.data_limit = 64;
  }
  all.rules = rules;
  all.personality = name;
}

bool set_rule(const std::string& name, int64_t value) {
  for (const auto& one : kRules) {
    if (name != one.name) continue;
    world().rules.*one.rule = value;
    return true;
  }
  return false;
}

namespace {

// FAKE_FABRIC="efa,segments=2,seed=5", for callers that cannot call fake_control.
const bool from_environment = [] {
  const char* text = std::getenv("FAKE_FABRIC");
  std::string rest = text != nullptr ? text : "worse";
  for (size_t comma = 0; comma != std::string::npos; rest = rest.substr(comma + 1)) {
    comma = rest.find(',');
    const std::string word = rest.substr(0, comma);
    const size_t equals = word.find('=');
    if (equals == std::string::npos) {
      set_personality(word);
    } else if (word.substr(0, equals) == "seed") {
      world().chance.seed(std::strtoull(word.c_str() + equals + 1, nullptr, 10));
    } else if (!set_rule(word.substr(0, equals), std::atoll(word.c_str() + equals + 1))) {
      std::abort();
    }
  }
  return true;
}();

}  // namespace

}  // namespace fake

extern "C" {

// FAKE_FABRIC_MINOR: an older or newer library.
uint32_t fi_version() {
  const char* minor = std::getenv("FAKE_FABRIC_MINOR");
  return FI_VERSION(1, minor != nullptr ? std::atoi(minor) : 20);
}

int fi_getinfo(uint32_t version, const char* node, const char* service, uint64_t flags,
               const struct fi_info* hints, struct fi_info** info) {
  return fake::getinfo(version, node, service, flags, hints, info);
}

struct fi_info* fi_dupinfo(const struct fi_info* info) { return fake::dupinfo(info); }
void fi_freeinfo(struct fi_info* info) { fake::freeinfo(info); }
const char* fi_strerror(int code) { return code < 256 ? strerror(code) : "fake error"; }

int fi_fabric(struct fi_fabric_attr* attr, struct fid_fabric** fabric, void* context) {
  return fake::open_fabric(attr, fabric, context);
}

// The test's own door. Returns −1 for an unknown rule.
int fake_control(const char* name, int64_t value) {
  const fake::Entered entered;
  if (std::strcmp(name, "seed") == 0) {
    fake::world().chance.seed(static_cast<uint64_t>(value));
    return 0;
  }
  return fake::set_rule(name, value) ? 0 : -1;
}

void fake_personality(const char* name) {
  const fake::Entered entered;
  fake::set_personality(name);
  fake::world().violations.clear();
  fake::world().counts.clear();
}

// Objects of a kind that are open: fabric, domain, mr, cq, eq, av, ep, pep, request; `wire`: writes on
// it; or how often something happened.
int64_t fake_count(const char* kind) {
  const fake::Entered entered;
  const auto& all = fake::world();
  if (std::strcmp(kind, "wire") == 0) return static_cast<int64_t>(all.wire.size());
  const auto live = all.live.find(kind);
  if (live != all.live.end()) return live->second;
  const auto count = all.counts.find(kind);
  return count == all.counts.end() ? 0 : count->second;
}

// The violations so far, a line each; the text is good until the next call.
const char* fake_violations() {
  const fake::Entered entered;
  static std::string text;
  text.clear();
  for (const std::string& one : fake::world().violations) text += one + "\n";
  return text.c_str();
}
}
