// Memory of a group: what is registered with its NICs, for good or for one session.

#include <algorithm>
#include <utility>

#include "group.hpp"

namespace pdnode {

namespace {

// Whether this NIC has a registration of every region that it works on, whatever the sessions.
bool registers_for_good(const Nic& nic) {
  return nic.limits.local_registration || !nic.provider.session_registration;
}

// Whether a NIC that is registered has this region. The mutex is held.
bool described(const SessionShared& shared, int region, int nic) {
  const auto& all = shared.descriptors;
  return std::any_of(all.begin(), all.end(), [region, nic](const Descriptor& one) {
    return one.nic == nic && one.region == region;
  });
}

}  // namespace

// Runs `job` on the thread that registers, and then what it returns on this group's.
void Group::aside(std::function<Command()> job) {
  if (!hub_.provider.pins) {
    job()(*this);
    return;
  }
  registrar_.post([this, job = std::move(job)] { post(job()); });
}

void Group::add_region(const std::shared_ptr<Region>& region,
                       const std::function<void(Error)>& done) {
  aside([this, region, done]() -> Command {
    auto found = std::make_shared<std::map<int, std::vector<Registration>>>();
    Error error;
    for (auto& nic : nics) {
      if (!registers_for_good(*nic)) continue;
      uint64_t access = FI_WRITE;
      if (!nic->provider.session_registration) access |= FI_REMOTE_WRITE;
      error = nic->register_all(region->whole(), access, &(*found)[nic->number]);
      if (error) break;
    }
    return [region, found, error, done](Group& on) {
      if (!error && !found->empty()) {
        for (const auto& [nic, pieces] : *found) {
          on.hub_.counters.registrations.fetch_add(pieces.size());
        }
        on.base_registrations_[region->number] = std::move(*found);
      }
      found->clear();
      done(error);
    };
  });
}

// A region of another group is registered when it is first needed here.
void Group::need_region(const std::shared_ptr<Region>& region,
                        std::function<void(const Error&)> then) {
  if (!registers_for_good(*nics.front()) || base_registrations_.count(region->number) != 0) {
    then(Error());
    return;
  }
  auto& waiting = registering_[region->number];
  waiting.push_back(std::move(then));
  if (waiting.size() > 1) return;
  add_region(region, [this, number = region->number](const Error& error) {
    const auto all = std::move(registering_[number]);
    registering_.erase(number);
    for (const auto& one : all) one(error);
  });
}

Error Group::prepare_nic(const Nic& nic, const std::vector<std::shared_ptr<Region>>& writable,
                         Prepared* prepared) const {
  prepared->held = writable;
  prepared->scratch = std::make_unique<uint8_t[]>(kScratchBytes);
  const uint64_t access = FI_REMOTE_WRITE | (nic.limits.local_registration ? FI_WRITE : 0);
  if (Error error = nic.register_piece({prepared->scratch.get(), kScratchBytes}, 0, kScratchBytes,
                                       access, &prepared->scratch_registration)) {
    return error;
  }
  if (!nic.provider.session_registration) return Error();
  for (const auto& region : writable) {
    auto& pieces = prepared->regions[region->number];
    if (Error error = nic.register_all(region->whole(), FI_REMOTE_WRITE, &pieces)) return error;
  }
  return Error();
}

void Group::carry(const std::shared_ptr<SessionShared>& shared,
                  const std::shared_ptr<Region>& region) {
  SessionPart* part = find_part(shared->id);
  if (part == nullptr || part->shared != shared) return;  // fenced: `fenced` is the answer
  auto& writable = part->writable;  // what is registered anew later has it as well
  if (std::find(writable.begin(), writable.end(), region) == writable.end()) {
    writable.push_back(region);
  }
  if (!hub_.provider.session_registration) {
    need_region(region, [this, shared, region](const Error& error) {
      if (!error) install_carried(shared, region, nullptr);
      say_carried(shared->id, error.text());
    });
    return;
  }
  std::vector<const Nic*> on;
  {
    const std::lock_guard<std::mutex> lock(shared->mutex);
    for (const auto& [index, registered] : part->nics) {
      // Asked for before, it may have missed a NIC that was just being registered anew.
      if (registered.registered && !described(*shared, region->number, index)) {
        on.push_back(registered.nic);
      }
    }
  }
  aside([shared, region, on]() -> Command {
    auto found = std::make_shared<std::map<int, std::vector<Registration>>>();
    Error error;
    for (const Nic* nic : on) {
      error = nic->register_all(region->whole(), FI_REMOTE_WRITE, &(*found)[nic->number]);
      if (error) break;
    }
    return [shared, region, found, error](Group& there) {
      if (!error) there.install_carried(shared, region, found.get());
      found->clear();
      there.say_carried(shared->id, error.text());
    };
  });
}

// `found`: registrations of the session's own; null where there are none.
void Group::install_carried(const std::shared_ptr<SessionShared>& shared,
                            const std::shared_ptr<Region>& region,
                            std::map<int, std::vector<Registration>>* found) {
  SessionPart* part = find_part(shared->id);
  if (part == nullptr || part->shared != shared) return;
  const std::lock_guard<std::mutex> lock(shared->mutex);
  for (auto& [index, on] : part->nics) {
    // Fenced meanwhile, or registered anew with this region.
    const bool known = described(*shared, region->number, index);
    if (!on.registered || known || (found != nullptr && found->count(index) == 0)) continue;
    auto& pieces = found != nullptr ? on.memory.regions[region->number]
                                    : base_registrations_[region->number][index];
    if (found != nullptr) {
      on.memory.held.push_back(region);
      pieces = std::move((*found)[index]);
      hub_.counters.registrations.fetch_add(pieces.size());
    }
    for (const Registration& piece : pieces) {
      shared->descriptors.push_back(
          {region->number, index, piece.offset, piece.length, piece.base, piece.key});
    }
  }
}

void Group::say_carried(int64_t session, const std::string& why) {
  Event event;
  event.kind = EventKind::kCarried;
  event.session = session;
  event.text = why;
  hub_.events.push(std::move(event));
}

const Registration* Group::local_piece(int region, int nic, uint64_t offset) const {
  const auto of_region = base_registrations_.find(region);
  if (of_region == base_registrations_.end()) return nullptr;
  const auto of_nic = of_region->second.find(nic);
  if (of_nic == of_region->second.end()) return nullptr;
  for (const Registration& piece : of_nic->second) {
    if (offset >= piece.offset && offset - piece.offset < piece.length) return &piece;
  }
  return nullptr;
}

}  // namespace pdnode
