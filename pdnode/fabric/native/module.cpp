// The Python module pdnode.fabric._native.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <memory>
#include <optional>

#include "fabric.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace pdnode;

namespace {

std::string to_bytes(const nb::bytes& bytes) { return std::string(bytes.c_str(), bytes.size()); }

uint64_t to_page(PyObject* number) {
  const long long value = PyLong_AsLongLong(number);
  if (value < 0) {
    if (PyErr_Occurred()) throw nb::python_error();
    throw FabricError("spans: " + std::to_string(value) + " is negative");
  }
  return static_cast<uint64_t>(value);
}

// By hand: a cast of a list of tuples costs ten times as much, and a chunk has up to thousands.
std::vector<Span> to_spans(nb::handle spans) {
  const nb::object list =
      nb::steal(PySequence_Fast(spans.ptr(), "spans: a sequence of (source, destination, count)"));
  if (!list.is_valid()) throw nb::python_error();
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(list.ptr());
  std::vector<Span> found;
  found.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(list.ptr(), i);
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 3) {
      throw FabricError("spans: an entry is not (source, destination, count)");
    }
    found.push_back({to_page(PyTuple_GET_ITEM(item, 0)), to_page(PyTuple_GET_ITEM(item, 1)),
                     to_page(PyTuple_GET_ITEM(item, 2))});
  }
  return found;
}

using PieceTuple = std::tuple<int, uint64_t, uint64_t, uint64_t, uint64_t>;
using RegionTuple = std::pair<int, std::vector<PieceTuple>>;

RemoteTable to_table(const std::vector<RegionTuple>& regions) {
  RemoteTable table;
  for (const auto& [rank, pieces] : regions) {
    if (rank < kScratch) throw FabricError("rank: " + std::to_string(rank) + " is below -1");
    if (table.count(rank) != 0) {
      throw FabricError("rank: " + std::to_string(rank) + " is described twice");
    }
    for (const auto& [nic, offset, length, base, key] : pieces) {
      table[rank].pieces[nic].push_back({offset, length, base, key});
    }
  }
  return table;
}

std::vector<RegionTuple> from_descriptors(const std::vector<Descriptor>& descriptors) {
  std::map<int, std::vector<PieceTuple>> regions;
  for (const Descriptor& one : descriptors) {
    regions[one.region].emplace_back(one.nic, one.offset, one.length, one.base, one.key);
  }
  return {regions.begin(), regions.end()};
}

void add_volume(nb::dict* row, const std::string& name, const Volume& volume) {
  (*row)[(name + "_bytes").c_str()] = volume.bytes.get();
  (*row)[(name + "_writes").c_str()] = volume.writes.get();
  (*row)[(name + "_pages").c_str()] = volume.pages.get();
}

void add_flow(nb::dict* row, const Flow& flow) {
  const auto flying = [&flow](Counter Volume::*part) {
    const uint64_t back = (flow.done.*part).get() + (flow.failed.*part).get();
    const uint64_t sent = (flow.posted.*part).get();
    return sent > back ? sent - back : 0;
  };
  add_volume(row, "posted", flow.posted);
  add_volume(row, "done", flow.done);
  add_volume(row, "failed", flow.failed);
  (*row)["bytes"] = flying(&Volume::bytes);
  (*row)["writes"] = flying(&Volume::writes);
  (*row)["pages"] = flying(&Volume::pages);
  (*row)["received_units"] = flow.received_units.get();
}

nb::dict limits(const Fabric& fabric) {
  const fi_info& info = fabric.info();
  const Limits posting = fabric.posting();
  nb::dict found;
  found["iov_limit"] = info.tx_attr->iov_limit;
  found["rma_iov_limit"] = info.tx_attr->rma_iov_limit;
  found["max_message_bytes"] = info.ep_attr->max_msg_size;
  found["cq_data_size"] = info.domain_attr->cq_data_size;
  found["mr_mode"] = info.domain_attr->mr_mode;
  found["endpoint"] = fabric.provider().endpoint == FI_EP_MSG ? "msg" : "rdm";
  found["session_registration"] = fabric.provider().session_registration;
  found["posts_receives"] = posting.posts_receives;
  found["delivery"] = fabric.provider().delivery;
  found["window"] = posting.window_writes;
  return found;
}

nb::dict build_info() {
  nb::dict found;
  found["compiler"] = PDNODE_COMPILER;
  found["libfabric_headers"] =
      std::to_string(FI_MAJOR_VERSION) + "." + std::to_string(FI_MINOR_VERSION);
  found["sanitizer"] = PDNODE_SANITIZER;
  return found;
}

nb::list nic_statistics(const Fabric& fabric) {
  nb::list rows;
  for (const Nic* nic : fabric.nics()) {
    nb::dict row;
    row["nic"] = nic->number;
    row["name"] = nic->name;
    row["address"] = nic->address;
    add_flow(&row, nic->flow);
    row["registered_bytes"] = nic->account.bytes.load();
    row["registrations"] = nic->account.registrations.load();
    rows.append(row);
  }
  return rows;
}

nb::list peer_statistics(const Fabric& fabric) {
  nb::list rows;
  for (const Fabric::PeerRow& peer : fabric.peers()) {
    nb::dict row;
    row["session"] = peer.session;
    row["local_nic"] = peer.pair->local;
    row["remote_nic"] = peer.pair->remote;
    add_flow(&row, peer.pair->flow);
    rows.append(row);
  }
  return rows;
}

nb::dict statistics(const Fabric& fabric) {
  nb::dict found;
  for (const auto& [name, value] : fabric.statistics()) found[name] = value;
  return found;
}

nb::list turns(const Fabric& fabric) {
  nb::list found;
  for (const uint64_t one : fabric.turns()) found.append(one);
  return found;
}

void bind_event(nb::module_& module) {
  nb::class_<Event>(module, "Event")
      .def_prop_ro("kind",
                   [](const Event& event) { return kEventNames[static_cast<int>(event.kind)]; })
      .def_ro("session", &Event::session)
      .def_ro("pair", &Event::pair)
      .def_ro("slot", &Event::slot)
      .def_ro("generation", &Event::generation)
      .def_ro("count", &Event::count)
      .def_ro("transfer", &Event::transfer)
      .def_ro("text", &Event::text)
      .def_ro("pairs", &Event::pairs)
      .def("__repr__", [](const Event& event) {
        return "<Event " + std::string(kEventNames[static_cast<int>(event.kind)]) + " session=" +
               std::to_string(event.session) + " pair=(" + std::to_string(event.pair.first) +
               ", " + std::to_string(event.pair.second) + ") slot=" +
               std::to_string(event.slot) + " transfer=" + std::to_string(event.transfer) + " " +
               event.text + ">";
      });
}

void bind_counter(nb::module_& module) {
  nb::class_<LayerCounter>(module, "LayerCounter")
      .def(nb::new_([](int page_fd, const std::vector<int>& wake_fds) {
             std::unique_ptr<LayerCounter> counter;
             if (Error error = LayerCounter::open(page_fd, wake_fds, &counter)) {
               throw FabricError(error.text());
             }
             return counter;
           }),
           "page_fd"_a, "wake_fds"_a)
      .def("raise_layer", &LayerCounter::raise)
      .def_prop_ro("value", &LayerCounter::value);
}

nb::bytes digest(const Fabric& self, int region, int64_t layers, int64_t layer_stride,
                 int64_t page_stride, int64_t offset, int64_t length,
                 const std::vector<int64_t>& pages) {
  const std::shared_ptr<const Region> memory = self.region(region);
  std::string digests;
  Error error;
  {
    nb::gil_scoped_release release;
    digests = digest_pages(*memory, {layers, layer_stride, page_stride, offset, length}, pages,
                           &error);
  }
  if (error) throw FabricError(error.text());
  return nb::bytes(digests.data(), digests.size());
}

// Other threads of Python go on while the provider pins, and may call: all but the wait is done
// under the GIL.
int keep_region(Fabric& self, Fabric::NewRegion added) {
  {
    const nb::gil_scoped_release release;
    added.done.wait();
  }
  return self.keep_region(std::move(added));
}

void bind_set_up(nb::class_<Fabric>& fabric) {
  fabric
      .def(nb::init<const std::string&, const std::string&, const std::string&, uint32_t,
                    double, bool>(),
           "library"_a, "provider"_a, "poll"_a, "window"_a = 0, "silence_s"_a = 60.0,
           "device_memory"_a = false)
      .def_prop_ro("library_version", &Fabric::library_version)
      .def_prop_ro("limits", &limits)
      .def("devices",
           [](const Fabric& self) {
             nb::list found;
             for (const Device& device : self.devices()) {
               found.append(nb::make_tuple(device.name, device.pci, device.state,
                                           device.bits_per_s));
             }
             return found;
           })
      .def_prop_ro("event_fd", &Fabric::event_fd)
      .def("take_events", &Fabric::take_events, "most"_a = 256)
      .def("add_group", &Fabric::add_group, "nics"_a, "cpu"_a = -1,
           nb::call_guard<nb::gil_scoped_release>())
      .def("wake_fd", &Fabric::wake_fd, "group"_a)
      .def("listen", &Fabric::listen, "nic"_a, "address"_a, "port"_a)
      .def("unlisten", &Fabric::unlisten, "nic"_a)
      .def("endpoint_name",
           [](Fabric& self, int64_t session, int nic) {
             const std::string name = self.endpoint_name(session, nic);
             return nb::bytes(name.data(), name.size());
           },
           "session"_a, "nic"_a)
      .def("add_region",
           [](Fabric& self, int group, int fd, uint64_t size, uint64_t page_bytes) {
             return keep_region(self, self.begin_region(group, fd, size, page_bytes));
           },
           "group"_a, "fd"_a, "size"_a, "page_bytes"_a)
      .def("add_device_region",
           [](Fabric& self, int group, int dmabuf, uint64_t address, uint64_t size,
              uint64_t page_bytes, int device) {
             return keep_region(
                 self, self.begin_device_region(group, dmabuf, address, size, page_bytes, device));
           },
           "group"_a, "dmabuf"_a, "address"_a, "size"_a, "page_bytes"_a, "device"_a)
      .def("remove_region", &Fabric::remove_region, "region"_a)
      .def("digest", &digest, "region"_a, "layers"_a, "layer_stride"_a, "page_stride"_a,
           "offset"_a, "length"_a, "pages"_a)
      .def("add_counter", &Fabric::add_counter, "page_fd"_a)
      .def("remove_counter", &Fabric::remove_counter, "counter"_a)
      .def("statistics", &statistics)
      .def("turns", &turns)
      .def("nic_statistics", &nic_statistics)
      .def("peer_statistics", &peer_statistics)
      .def("close", [](Fabric& self) { return self.close().text(); },
           nb::call_guard<nb::gil_scoped_release>());
}

void bind_sessions(nb::class_<Fabric>& fabric) {
  fabric
      .def("open_session",
           [](Fabric& self, int64_t session, const std::vector<int>& nics,
              const std::vector<int>& writable, const nb::bytes& token) {
             self.open_session(session, nics, writable, to_bytes(token));
           },
           "session"_a, "nics"_a, "writable"_a, "token"_a)
      .def("descriptors",
           [](Fabric& self, int64_t session) { return from_descriptors(self.descriptors(session)); },
           "session"_a)
      .def("carry", &Fabric::carry, "session"_a, "region"_a, "group"_a)
      .def("connect",
           [](Fabric& self, int64_t session, Pair pair, const nb::bytes& endpoint,
              double deadline_s) {
             self.connect(session, pair, to_bytes(endpoint), deadline_s);
           },
           "session"_a, "pair"_a, "endpoint"_a, "deadline_s"_a)
      .def("set_remote",
           [](Fabric& self, int64_t session, const std::vector<RegionTuple>& regions) {
             self.set_remote(session, to_table(regions));
           },
           "session"_a, "regions"_a)
      .def("probe", &Fabric::probe, "session"_a, "answer"_a = false)
      .def("fence", &Fabric::fence, "session"_a, "pair"_a = nb::none())
      .def("arm", &Fabric::arm, "slot"_a, "generation"_a, "session"_a, "expected"_a)
      .def("disarm", &Fabric::disarm, "slot"_a)
      .def("counted", &Fabric::counted, "slot"_a);
}

void bind_transfers(nb::class_<Fabric>& fabric) {
  fabric
      .def("open_transfer", &Fabric::open_transfer, "transfer"_a, "session"_a, "immediate"_a,
           "pair"_a = nb::none())
      .def("submit",
           [](Fabric& self, int64_t transfer, int counter, uint64_t base, int64_t layers,
              int region, int64_t source_layer_stride, int64_t source_page_stride,
              int64_t source_offset, int remote_rank, int64_t remote_layer_stride,
              int64_t remote_page_stride, int64_t remote_offset, int64_t length, bool whole_page,
              const nb::object& spans, int group) {
             SubmitArguments arguments;
             arguments.transfer = transfer;
             arguments.counter = counter;
             arguments.base = base;
             arguments.layers = layers;
             arguments.region = region;
             arguments.source_layer_stride = source_layer_stride;
             arguments.source_page_stride = source_page_stride;
             arguments.source_offset = source_offset;
             arguments.remote_rank = remote_rank;
             arguments.remote_layer_stride = remote_layer_stride;
             arguments.remote_page_stride = remote_page_stride;
             arguments.remote_offset = remote_offset;
             arguments.length = length;
             arguments.whole_page = whole_page;
             arguments.group = group;
             self.submit(arguments, to_spans(spans));
           },
           "transfer"_a, "counter"_a, "base"_a, "layers"_a, "region"_a, "source_layer_stride"_a,
           "source_page_stride"_a, "source_offset"_a, "remote_rank"_a, "remote_layer_stride"_a,
           "remote_page_stride"_a, "remote_offset"_a, "length"_a, "whole_page"_a, "spans"_a,
           "group"_a = -1)
      .def("finish", &Fabric::finish, "transfer"_a)
      .def("stop", &Fabric::stop, "transfer"_a)
      .def("close_transfer", &Fabric::close_transfer, "transfer"_a);
}

}  // namespace

NB_MODULE(_native, module) {
  nb::exception<FabricError>(module, "FabricError");
  nb::tuple kinds = nb::steal<nb::tuple>(PyTuple_New(std::size(kEventNames)));
  for (size_t i = 0; i < std::size(kEventNames); ++i) {
    PyTuple_SET_ITEM(kinds.ptr(), static_cast<Py_ssize_t>(i),
                     PyUnicode_FromString(kEventNames[i]));
  }
  module.attr("EVENT_KINDS") = kinds;
  bind_event(module);
  bind_counter(module);
  nb::class_<Fabric> fabric(module, "Fabric");
  bind_set_up(fabric);
  bind_sessions(fabric);
  bind_transfers(fabric);
  module.def("build_info", &build_info);
}
