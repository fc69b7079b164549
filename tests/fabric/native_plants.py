"""Faults planted into copies of the core's sources, each chosen by PDNODE_PLANT at run time.

A plant is what a hurried change would do. The suite on the fake libfabric must find every one;
the core itself has no hooks for that.
"""

from dataclasses import dataclass
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "pdnode" / "fabric" / "native"

HEADER = """#pragma once
#include <cstdlib>
inline bool planted(int number) {
  static const char* const text = std::getenv("PDNODE_PLANT");
  return text != nullptr && std::atoi(text) == number;
}
"""


@dataclass(frozen=True, slots=True)
class Plant:
    """`edits`: (file, text that occurs once, its replacement).

    `seeds` of `personality` from `first` on find it.
    """

    number: int
    name: str
    personality: str
    edits: tuple[tuple[str, str, str], ...]
    seeds: int = 40
    first: int = 0


PLANTS = (
    Plant(1, "delivery flag dropped", "efa", ((
        "group_post.cpp",
        "FI_COMPLETION | FI_REMOTE_CQ_DATA | hub_.provider.delivery_flag |\n"
        "                         (more",
        "FI_COMPLETION |\n"
        "      (planted(3) && write.next.layer == program->cursor.layer\n"
        "           ? 0 : FI_REMOTE_CQ_DATA) |\n"
        "      (planted(1) ? 0 : hub_.provider.delivery_flag) | (more",
    ),)),
    Plant(2, "key assumed", "verbs", ((
        "nic.cpp",
        "piece->key = fi_mr_key(piece->mr.get());",
        "piece->key = planted(2) ? key : fi_mr_key(piece->mr.get());",
    ),)),
    Plant(3, "order assumed: one immediate after the last write of a layer", "efa", ((
        "group_post.cpp",
        "message.data = program->transfer->immediate | write.pages;",
        "message.data = program->transfer->immediate |\n"
        "      (planted(3) ? (program->records[op->layer].bytes + write.bytes) / program->length\n"
        "                  : planted(15) ? write.segments : write.pages);",
    ),)),
    Plant(4, "double counting of the last arrival in a batch", "verbs", ((
        "group_complete.cpp",
        "      on_immediate(nic, static_cast<uint32_t>(entry.data));\n",
        "      on_immediate(nic, static_cast<uint32_t>(entry.data));\n"
        "      if (planted(4) && count > 1 && i + 1 == count) {\n"
        "        on_immediate(nic, static_cast<uint32_t>(entry.data));\n"
        "      }\n",
    ),)),
    Plant(5, "generation ignored", "efa", ((
        "slots.cpp",
        "immediate.generation != generation_of(state)",
        "(!planted(5) && immediate.generation != generation_of(state))",
    ),)),
    Plant(6, "window ignored", "efa", (
        (
            "group_post.cpp",
            "while (posted < budget && connection->has_room(urgent) &&",
            "while (posted < budget && (planted(6) ||\n"
            "         connection->has_room(urgent && !planted(24))) &&",
        ),
        (
            "group_post.cpp",
            "if (!connection->has_room(urgent)) continue;",
            "if (!planted(6) && !connection->has_room(urgent && !planted(24))) continue;",
        ),
    ), seeds=200),
    Plant(7, "completion error ignored", "efa", ((
        "group_complete.cpp",
        "  finish_op(op, why, now_ns());\n",
        "  finish_op(op, planted(7) ? \"\" : why, now_ns());\n  if (planted(7)) return;\n",
    ),)),
    Plant(8, "receive not posted again", "verbs", ((
        "group_complete.cpp",
        "++receiver->owed;",
        "if (!planted(8)) ++receiver->owed;",
    ),)),
    Plant(9, "drained before the writes came back", "verbs", ((
        "group_post.cpp",
        "if (program->ended || program->outstanding > 0) return;",
        "if (program->ended || (!planted(9) && program->outstanding > 0)) return;",
    ),)),
    Plant(10, "offsets instead of virtual addresses", "efa", ((
        "nic.cpp",
        "piece->base = limits.virtual_addresses ?",
        "piece->base = limits.virtual_addresses && !planted(10) ?",
    ),)),
    Plant(11, "registrations left open at a fence", "efa", ((
        "group_fence.cpp",
        "      closing_memory->push_back(std::move(on.memory));\n",
        "      closing_memory->push_back(std::move(on.memory));\n"
        "      if (planted(11)) {\n"
        "        static auto& left = *new std::vector<Prepared>;\n"
        "        left.push_back(std::move(closing_memory->back()));\n"
        "        closing_memory->pop_back();\n"
        "      }\n",
    ),)),
    Plant(12, "writes may be delivered twice", "efa", ((
        "nic.cpp",
        "bool in_order = true;",
        "bool in_order = !planted(12);",
    ),)),
    Plant(13, "an API below 1.18 asked for", "efa", ((
        "provider.cpp",
        "getinfo(device_memory ? kDeviceApiVersion : kApiVersion,",
        "getinfo(planted(13)       ? FI_VERSION(1, 17)\n"
        "                  : device_memory ? kDeviceApiVersion\n"
        "                                  : kApiVersion,",
    ),)),
    Plant(14, "source descriptor dropped", "verbs", ((
        "group_post.cpp",
        "descriptor = fi_mr_desc(here->mr.get());",
        "descriptor = planted(14) ? nullptr : fi_mr_desc(here->mr.get());",
    ),)),
    Plant(15, "a merged write counts as one page", "verbs", ()),
    Plant(16, "connection left open at a fence", "verbs", ((
        "group_fence.cpp",
        "      close(&connection->own, *connection->nic);",
        "      if (planted(16)) connection->own.release();\n"
        "      close(&connection->own, *connection->nic);",
    ),)),
    Plant(17, "more segments than the provider takes", "verbs", ((
        "provider.cpp",
        "  if (limits.segments < 1) limits.segments = 1;\n",
        "  if (limits.segments < 1 || planted(17)) limits.segments = kMaxSegments;\n",
    ),)),
    Plant(18, "a doorbell left unrung by a batch that breaks off", "verbs", ((
        "group_post.cpp",
        "  if (connection->bell_owed) ring(connection);\n  return posted;",
        "  if (connection->bell_owed && !planted(18)) ring(connection);\n  return posted;",
    ),), first=9),
    Plant(19, "writes on a NIC that is out never fail", "efa", ((
        "group_complete.cpp",
        "if (connection->nic == nic) lose(connection.get(), nic->dead);",
        "if (connection->nic == nic && !planted(19)) lose(connection.get(), nic->dead);",
    ),), first=49),
    Plant(20, "contexts of fenced connections are kept for ever", "verbs", ((
        "group_fence.cpp",
        "if (!all_read && one.nic->empty_runs - one.empty_runs < 2) return false;",
        "if (planted(20) || (!all_read && one.nic->empty_runs - one.empty_runs < 2)) return false;",
    ),), first=24),
    Plant(21, "a fence that failed is said all the same", "verbs", ((
        "group_fence.cpp",
        "  if (error) {\n    say_lost(ticket->session",
        "  if (error && !planted(21)) {\n    say_lost(ticket->session",
    ),)),
    Plant(22, "a full window is refilled write by write", "verbs", ((
        "session.cpp",
        "writes <= nic->limits.window_writes / 2 &&",
        "writes <= (planted(22)   ? nic->limits.window_writes - 1\n"
        "             : planted(23) ? 0\n"
        "                           : nic->limits.window_writes / 2) &&",
    ),), seeds=1),
    Plant(23, "a full window is refilled when it is empty", "verbs", (), seeds=1),
    Plant(24, "a raised layer waits for room behind bulk", "verbs", (), seeds=1),
)  # fmt: skip


def write_planted(folder: Path) -> None:
    """Writes the copies; leaves a file alone that is right already, so that nothing is rebuilt."""
    texts: dict[str, str] = {}
    for plant in PLANTS:
        for file, old, new in plant.edits:
            text = texts.setdefault(file, (NATIVE / file).read_text())
            assert text.count(old) == 1, f"plant {plant.number}: {text.count(old)} x {old!r}"
            texts[file] = text.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    texts = {name: f'#include "plant.hpp"\n{text}' for name, text in texts.items()}
    texts["plant.hpp"] = HEADER
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for path in folder.iterdir():
        if path.name not in texts:
            path.unlink()
