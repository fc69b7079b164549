#include "provider.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "compat.hpp"

namespace pdnode {

namespace {

constexpr uint64_t kUnlimited = uint64_t{1} << 46;
// EFA: 4 GiB of 4 KiB pages in one registration, 95 GB in a NIC (public reports).
constexpr uint64_t kEfaPieceEntries = uint64_t{1} << 20;
constexpr uint64_t kEfaNicEntries = 24'000'000;

const Provider kProviders[] = {
    {"tcp", "tcp", FI_EP_MSG, true, FI_DELIVERY_COMPLETE,
     "the target's progress thread acknowledged it", kUnlimited, kUnlimited, false, false, true,
     false, true, 144},
    {"verbs", "verbs", FI_EP_MSG, false, 0, "RC acknowledgement", kUnlimited, kUnlimited, false,
     true, true, true, false, 192},
    {"efa", "efa", FI_EP_RDM, true, FI_DELIVERY_COMPLETE, "the device acknowledged it",
     kEfaPieceEntries, kEfaNicEntries, true, true, true, true, false, 192},
    {"tcp-rdm", "tcp", FI_EP_RDM, true, FI_DELIVERY_COMPLETE,
     "the target's progress thread acknowledged it", kUnlimited, kUnlimited, false, false, false,
     false, true, 96},
};

Info make_hints(const Library& library, const Provider& provider, const std::string& domain,
                bool device_memory) {
  Info hints(&library, library.dupinfo(nullptr));
  if (!hints) return hints;
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
  hints->ep_attr->type = provider.endpoint;
  if (provider.kernel_sockets) hints->tx_attr->size = provider.window_writes;  // 256 by default
  hints->domain_attr->threading = provider.pins ? FI_THREAD_SAFE : FI_THREAD_DOMAIN;
  // Our own thread polls: an automatic progress thread inside the provider would only compete.
  hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  if (device_memory) {
    hints->caps |= FI_HMEM;
    hints->domain_attr->mr_mode |= FI_MR_HMEM;
  }
  if (provider.endpoint == FI_EP_RDM) hints->domain_attr->av_type = FI_AV_TABLE;
  hints->fabric_attr->prov_name = strdup(provider.prov_name);
  if (!domain.empty()) hints->domain_attr->name = strdup(domain.c_str());
  return hints;
}

}  // namespace

const Provider* find_provider(const std::string& name) {
  for (const Provider& provider : kProviders) {
    if (name == provider.name) return &provider;
  }
  return nullptr;
}

std::string provider_names() {
  std::string names;
  for (const Provider& provider : kProviders) {
    names += (names.empty() ? "" : ", ") + std::string(provider.name);
  }
  return names;
}

Error query(const Library& library, const Provider& provider, const std::string& node,
            const std::string& service, const std::string& domain, bool device_memory, Info* info) {
  Info hints = make_hints(library, provider, domain, device_memory);
  if (!hints) return Error("fi_dupinfo: out of memory");
  fi_info* found = nullptr;
  const bool source = !node.empty();
  const int code = library.getinfo(device_memory ? kDeviceApiVersion : kApiVersion,
                                   source ? node.c_str() : nullptr,
                                   service.empty() ? nullptr : service.c_str(),
                                   source ? FI_SOURCE : 0, hints.get(), &found);
  if (code == -FI_ENODATA || code == -FI_ENOSYS) {
    return Error("provider '" + std::string(provider.name) + "' is not available in " +
                 library.path() + (source ? " for address " + node : "") +
                 (domain.empty() ? "" : " for device " + domain));
  }
  if (Error error = library.check("fi_getinfo", code, provider.name)) return error;
  const Info all(&library, found);
  for (const fi_info* one = found; one != nullptr; one = one->next) {
    if (std::strcmp(one->fabric_attr->prov_name, provider.prov_name) != 0) continue;
    if (one->domain_attr->cq_data_size < 4) continue;  // an immediate is 32 bits
    *info = Info(&library, library.dupinfo(one));
    return *info ? Error() : Error("fi_dupinfo: out of memory");
  }
  return Error("provider '" + std::string(provider.name) + "' is not available in " +
               library.path() + " with 32-bit immediates");
}

Error list_devices(const Library& library, const Provider& provider, std::vector<Device>* found) {
  const Info hints = make_hints(library, provider, "", false);
  if (!hints) return Error("fi_dupinfo: out of memory");
  fi_info* first = nullptr;
  const int code = library.getinfo(kApiVersion, nullptr, nullptr, 0, hints.get(), &first);
  if (code == -FI_ENODATA || code == -FI_ENOSYS) return Error();
  if (Error error = library.check("fi_getinfo", code, provider.name)) return error;
  const Info all(&library, first);
  for (const fi_info* one = first; one != nullptr; one = one->next) {
    if (std::strcmp(one->fabric_attr->prov_name, provider.prov_name) != 0) continue;
    Device device;
    device.name = one->domain_attr->name != nullptr ? one->domain_attr->name : "";
    const bool known = std::any_of(found->begin(), found->end(), [&device](const Device& other) {
      return other.name == device.name;
    });
    if (known) continue;
    if (const fid_nic* nic = one->nic) {
      if (nic->bus_attr != nullptr && nic->bus_attr->bus_type == FI_BUS_PCI) {
        const fi_pci_attr& pci = nic->bus_attr->attr.pci;
        std::array<char, 32> text{};
        std::snprintf(text.data(), text.size(), "%04x:%02x:%02x.%x", pci.domain_id, pci.bus_id,
                      pci.device_id, pci.function_id);
        device.pci = text.data();
      }
      if (nic->link_attr != nullptr) {
        if (nic->link_attr->state == FI_LINK_UP) device.state = "up";
        if (nic->link_attr->state == FI_LINK_DOWN) device.state = "down";
        device.bits_per_s = nic->link_attr->speed;
      }
    }
    found->push_back(std::move(device));
  }
  return Error();
}

Limits limits_of(const Provider& provider, const fi_info& info, uint32_t most_writes) {
  Limits limits;
  limits.segments = kMaxSegments;
  if (info.tx_attr->iov_limit < limits.segments) limits.segments = info.tx_attr->iov_limit;
  if (info.tx_attr->rma_iov_limit < limits.segments) limits.segments = info.tx_attr->rma_iov_limit;
  if (limits.segments < 1) limits.segments = 1;
  limits.message_bytes = info.ep_attr->max_msg_size;
  uint32_t window = provider.window_writes;
  if (most_writes > 0) window = std::min(window, most_writes + most_writes / 2);
  if (info.tx_attr->size < window) window = std::max<uint32_t>(1, info.tx_attr->size);
  limits.urgent_window_writes = window;
  limits.window_writes = limits.urgent_window_writes - limits.urgent_window_writes / 3;
  limits.posts_receives = (info.mode & FI_RX_CQ_DATA) != 0;
  limits.receives = static_cast<uint32_t>(
      std::clamp<size_t>(info.rx_attr->size, 1, size_t{2} * provider.window_writes));
  limits.local_registration = (info.domain_attr->mr_mode & (FI_MR_LOCAL | FI_MR_HMEM)) != 0;
  limits.virtual_addresses = (info.domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
  limits.provider_keys = (info.domain_attr->mr_mode & FI_MR_PROV_KEY) != 0;
  return limits;
}

}  // namespace pdnode
