"""The answers of both transfer machines; tests/unit/test_transfer_table.py reads and checks them.

A line is `inputs | effects | state after`. `-`: no effect. `!`: not reachable, with the reason.
"""

GRANT_TABLE = """
reserved:
  dispatched | - | dispatched
  cancel | free | free
  end; tick after 9 s; tick after 11 s; tick after 31 s; pair_fenced | - | reserved
  pair_fenced, no slot left; accepted; progress | - | reserved
  landed; failed; failed, pairs; drain_done | - | reserved
  reached, its slot; reached, old slot; reached, other generation | - | reserved
  overshoot, its slot; overshoot, other slot | - | reserved
  session_lost | lost(link_lost), free | free
  session_fenced | the loss of a session comes before its fence | !
dispatched:
  dispatched | dispatched once | !
  cancel | Cancel, quarantine | cancelling
  end; tick after 9 s; tick after 11 s; accepted; progress; landed; drain_done | - | dispatched
  reached, old slot; reached, other generation; overshoot, other slot | - | dispatched
  tick after 31 s | lost(stalled), Cancel, quarantine | cancelling
  pair_fenced | Regrant | dispatched
  pair_fenced, no slot left | lost(overloaded), Cancel, quarantine | cancelling
  failed | lost(write), quarantine | failed
  failed, pairs | fencepairs, lost(write), quarantine | failed
  reached, its slot | enter | complete
  overshoot, its slot | lost(overshoot), Cancel, quarantine | cancelling
  session_lost | lost(link_lost), quarantine | failed
  session_fenced | the loss of a session comes before its fence | !
dispatched drained:
  dispatched | dispatched once | !
  cancel | free | free
  end; tick after 9 s; pair_fenced | - | dispatched
  pair_fenced, no slot left; accepted; progress; landed | - | dispatched
  failed; drain_done; reached, old slot; reached, other generation | - | dispatched
  overshoot, other slot | - | dispatched
  tick after 11 s; tick after 31 s | lost(short), free | free
  failed, pairs | fencepairs | dispatched
  reached, its slot | enter | complete
  overshoot, its slot | lost(overshoot), free | free
  session_lost | lost(link_lost), free | free
  session_fenced | the loss of a session comes before its fence | !
dispatched regranted:
  dispatched | dispatched once | !
  cancel | Cancel, quarantine | cancelling
  end; tick after 9 s; tick after 11 s; accepted; progress; landed; drain_done | - | dispatched
  reached, old slot; reached, other generation; overshoot, other slot | - | dispatched
  tick after 31 s | lost(stalled), Cancel, quarantine | cancelling
  pair_fenced | Regrant | dispatched
  pair_fenced, no slot left | lost(overloaded), Cancel, quarantine | cancelling
  failed | lost(write), quarantine | failed
  failed, pairs | fencepairs, lost(write), quarantine | failed
  reached, its slot | enter | complete
  overshoot, its slot | lost(overshoot), Cancel, quarantine | cancelling
  session_lost | lost(link_lost), quarantine | failed
  session_fenced | the loss of a session comes before its fence | !
dispatched regranted old-reached:
  dispatched | dispatched once | !
  cancel | Cancel, quarantine | cancelling
  end; tick after 9 s; tick after 11 s | - | dispatched
  accepted; progress; landed; reached, old slot | - | dispatched
  reached, other generation; overshoot, other slot | - | dispatched
  tick after 31 s | lost(stalled), Cancel, quarantine | cancelling
  pair_fenced | Regrant | dispatched
  pair_fenced, no slot left | lost(overloaded), Cancel, quarantine | cancelling
  failed | lost(write), quarantine | failed
  failed, pairs | fencepairs, lost(write), quarantine | failed
  drain_done; reached, its slot | enter | complete
  overshoot, its slot | lost(overshoot), Cancel, quarantine | cancelling
  session_lost | lost(link_lost), quarantine | failed
  session_fenced | the loss of a session comes before its fence | !
complete:
  dispatched | dispatched once | !
  cancel; tick after 9 s; accepted; progress | - | complete
  landed; failed; drain_done; reached, its slot | - | complete
  reached, old slot; reached, other generation; overshoot, other slot; session_lost | - | complete
  session_fenced | - | complete
  end | quarantine | complete
  tick after 11 s; tick after 31 s | droplink | complete
  pair_fenced; pair_fenced, no slot left | Cancel | complete
  failed, pairs | fencepairs | complete
  overshoot, its slot | lost(overshoot, final) | complete
complete drained:
  dispatched | dispatched once | !
  cancel; tick after 9 s; tick after 11 s; tick after 31 s; pair_fenced | - | complete
  pair_fenced, no slot left; accepted; progress; landed; failed; drain_done | - | complete
  reached, its slot; reached, old slot; reached, other generation | - | complete
  overshoot, other slot; session_lost; session_fenced | - | complete
  end | free | free
  failed, pairs | fencepairs | complete
  overshoot, its slot | lost(overshoot, final) | complete
complete ended:
  dispatched | dispatched once | !
  cancel; end; tick after 9 s; accepted | - | complete
  progress; landed; failed; reached, its slot | - | complete
  reached, old slot; reached, other generation; overshoot, its slot | - | complete
  overshoot, other slot; session_lost | - | complete
  tick after 11 s; tick after 31 s | droplink | complete
  pair_fenced; pair_fenced, no slot left | Cancel | complete
  failed, pairs | fencepairs | complete
  drain_done; session_fenced | free | free
failed:
  dispatched | dispatched once | !
  cancel; end; tick after 9 s; pair_fenced; pair_fenced, no slot left; accepted | - | failed
  progress; landed; failed | - | failed
  reached, its slot; reached, old slot; reached, other generation | - | failed
  overshoot, its slot; overshoot, other slot; session_lost | - | failed
  tick after 11 s; tick after 31 s | droplink | failed
  failed, pairs | fencepairs | failed
  drain_done; session_fenced | free | free
failed lost:
  dispatched | dispatched once | !
  cancel; end; tick after 9 s; tick after 11 s; tick after 31 s; pair_fenced | - | failed
  pair_fenced, no slot left; accepted; progress; landed; failed; reached, its slot | - | failed
  reached, old slot; reached, other generation; overshoot, its slot | - | failed
  overshoot, other slot; session_lost | - | failed
  failed, pairs | fencepairs | failed
  drain_done; session_fenced | free | free
cancelling:
  dispatched | dispatched once | !
  cancel; end; tick after 9 s; pair_fenced; pair_fenced, no slot left; accepted | - | cancelling
  progress; landed; failed | - | cancelling
  reached, its slot; reached, old slot; reached, other generation | - | cancelling
  overshoot, its slot; overshoot, other slot; session_lost | - | cancelling
  tick after 11 s; tick after 31 s | droplink | cancelling
  failed, pairs | fencepairs | cancelling
  drain_done; session_fenced | free | free
free:
  dispatched | dispatched once | !
  cancel; end; tick after 9 s; tick after 11 s; tick after 31 s; pair_fenced | - | free
  pair_fenced, no slot left; accepted; progress | - | free
  landed; failed; failed, pairs; drain_done | - | free
  reached, its slot; reached, old slot; reached, other generation; overshoot, its slot | - | free
  overshoot, other slot; session_lost; session_fenced | - | free
"""

PUSH_TABLE = """
queued:
  planned | open, submit 0@0 | running
  planned, last | open, submit 0@0, finish | running
  pass_done; pass_done, all | no pass runs it | !
  engine_failed | Failed(engine), unschedule, Drained, free | done
  cancel | unschedule, Drained, free | done
  regrant; nic_fenced; nic_fenced, other; tick after 9 s; tick after 11 s | - | queued
  transfer_drained; transfer_failed; transfer_failed, all pairs | no transfer is open | !
  transfer_failed, no pair; transfer_settled; transfer_settled, one more | no transfer is open | !
  transfer_failed, stranded | no transfer is open | !
  transfer_settled, all pairs; not_opened | no transfer is open | !
  refused | Failed(write), unschedule, Drained, free | done
  session_lost | unschedule, free | done
running in-pass:
  planned; planned, last | one pass at a time | !
  pass_done | Progress | running
  pass_done, all | Progress | computed
  engine_failed | Failed(engine), unschedule, stop | failed
  cancel | unschedule, stop | cancelling
  regrant | stop | replay
  nic_fenced; nic_fenced, other; tick after 9 s; tick after 11 s | - | running
  transfer_drained | drained follows finish or stop | !
  transfer_failed | pair down p | replay
  transfer_failed, all pairs | Failed(write 1), unschedule | failed
  transfer_failed, no pair | Failed(write), unschedule | failed
  transfer_failed, stranded | - | replay
  transfer_settled; transfer_settled, one more | failed comes before settled | !
  transfer_settled, all pairs | failed comes before settled | !
  not_opened | Failed(write), unschedule, Drained | failed
  refused | Failed(write), unschedule, stop | failed
  session_lost | unschedule, stop | lost
running:
  planned | submit 1@2 | running
  planned, last | submit 1@2, finish | running
  pass_done; pass_done, all | no pass runs it | !
  engine_failed | Failed(engine), unschedule, stop | failed
  cancel | unschedule, stop | cancelling
  regrant | stop | replay
  nic_fenced; nic_fenced, other; tick after 9 s; tick after 11 s | - | running
  transfer_drained | drained follows finish or stop | !
  transfer_failed | pair down p | replay
  transfer_failed, all pairs | Failed(write 1), unschedule | failed
  transfer_failed, no pair | Failed(write), unschedule | failed
  transfer_failed, stranded | - | replay
  transfer_settled; transfer_settled, one more | failed comes before settled | !
  transfer_settled, all pairs | failed comes before settled | !
  not_opened | Failed(write), unschedule, Drained, free | done
  refused | Failed(write), unschedule, stop | failed
  session_lost | unschedule, stop | lost
running in-last-pass:
  planned; planned, last | one pass at a time | !
  pass_done | Progress | running
  pass_done, all | Progress | computed
  engine_failed | Failed(engine), unschedule, stop | failed
  cancel | unschedule, stop | cancelling
  regrant | stop | replay
  nic_fenced; nic_fenced, other; transfer_drained; tick after 9 s; tick after 11 s | - | running
  transfer_failed | pair down p | replay
  transfer_failed, all pairs | Failed(write 1), unschedule | failed
  transfer_failed, no pair | Failed(write), unschedule | failed
  transfer_failed, stranded | - | replay
  transfer_settled; transfer_settled, one more | failed comes before settled | !
  transfer_settled, all pairs | failed comes before settled | !
  not_opened | Failed(write), unschedule, Drained | failed
  refused | Failed(write), unschedule, stop | failed
  session_lost | unschedule, stop | lost
computed:
  planned; planned, last | its last chunk was planned | !
  pass_done; pass_done, all | no pass runs it | !
  engine_failed | Failed(engine), unschedule, stop | failed
  cancel | unschedule, stop | cancelling
  regrant | stop | replay
  nic_fenced; nic_fenced, other; tick after 9 s; tick after 11 s | - | computed
  transfer_drained | Drained, free | done
  transfer_failed | pair down p | replay
  transfer_failed, all pairs | Failed(write 1), unschedule | failed
  transfer_failed, no pair | Failed(write), unschedule | failed
  transfer_failed, stranded | - | replay
  transfer_settled; transfer_settled, one more | failed comes before settled | !
  transfer_settled, all pairs | failed comes before settled | !
  not_opened | Failed(write), unschedule, Drained, free | done
  refused | Failed(write), unschedule, stop | failed
  session_lost | unschedule, stop | lost
replay in-pass:
  planned; planned, last | one pass at a time | !
  pass_done; pass_done, all | Progress | replay
  engine_failed | Failed(engine), unschedule | failed
  cancel | unschedule | cancelling
  regrant; nic_fenced; nic_fenced, other; transfer_settled; tick after 9 s | - | replay
  transfer_drained; transfer_failed | failed comes once, and settled after it | !
  transfer_failed, all pairs | failed comes once, and settled after it | !
  transfer_failed, no pair | failed comes once, and settled after it | !
  transfer_failed, stranded | failed comes once, and settled after it | !
  transfer_settled, one more | pair down q | replay
  transfer_settled, all pairs | Failed(write 1), unschedule | failed
  not_opened | the transfer was opened | !
  refused | Failed(write), unschedule | failed
  session_lost | unschedule | lost
  tick after 11 s | droplink | replay
replay failed:
  planned; planned, last | its last chunk was planned | !
  pass_done; pass_done, all | no pass runs it | !
  engine_failed | Failed(engine), unschedule | failed
  cancel | unschedule | cancelling
  regrant; nic_fenced; nic_fenced, other; transfer_settled; tick after 9 s | - | replay
  transfer_drained; transfer_failed | failed comes once, and settled after it | !
  transfer_failed, all pairs | failed comes once, and settled after it | !
  transfer_failed, no pair | failed comes once, and settled after it | !
  transfer_failed, stranded | failed comes once, and settled after it | !
  transfer_settled, one more | pair down q | replay
  transfer_settled, all pairs | Failed(write 1), unschedule | failed
  not_opened | the transfer was opened | !
  refused | Failed(write), unschedule | failed
  session_lost | unschedule | lost
  tick after 11 s | droplink | replay
replay unfenced:
  planned; planned, last | its last chunk was planned | !
  pass_done; pass_done, all | no pass runs it | !
  engine_failed | Failed(engine), unschedule | failed
  cancel | unschedule | cancelling
  regrant; nic_fenced; nic_fenced, other; tick after 9 s | - | replay
  transfer_drained; transfer_failed | the core has had its last word on the transfer | !
  transfer_failed, all pairs | the core has had its last word on the transfer | !
  transfer_failed, no pair; transfer_settled | the core has had its last word on the transfer | !
  transfer_failed, stranded | the core has had its last word on the transfer | !
  transfer_settled, one more | the core has had its last word on the transfer | !
  transfer_settled, all pairs | the core has had its last word on the transfer | !
  not_opened | the transfer was opened | !
  refused | Failed(write), unschedule | failed
  session_lost | unschedule, free | done
  tick after 11 s | droplink | replay
replay regranted:
  planned; planned, last | its last chunk was planned | !
  pass_done; pass_done, all | no pass runs it | !
  engine_failed | Failed(engine), unschedule | failed
  cancel | unschedule | cancelling
  regrant; nic_fenced; nic_fenced, other; tick after 9 s; tick after 11 s | - | replay
  transfer_drained | open, submit 0, finish | computed
  transfer_failed | pair down p | replay
  transfer_failed, all pairs | Failed(write 1), unschedule | failed
  transfer_failed, no pair; transfer_failed, stranded | - | replay
  refused | Failed(write), unschedule | failed
  transfer_settled; transfer_settled, one more | failed comes before settled | !
  transfer_settled, all pairs | failed comes before settled | !
  not_opened | the transfer was opened | !
  session_lost | unschedule | lost
replay regranted in-pass:
  planned; planned, last | one pass at a time | !
  pass_done; pass_done, all | Progress | replay
  engine_failed | Failed(engine), unschedule | failed
  cancel | unschedule | cancelling
  regrant; nic_fenced; nic_fenced, other; tick after 9 s; tick after 11 s | - | replay
  transfer_drained | open, submit 0@0 | running
  transfer_failed | pair down p | replay
  transfer_failed, all pairs | Failed(write 1), unschedule | failed
  transfer_failed, no pair; transfer_failed, stranded | - | replay
  refused | Failed(write), unschedule | failed
  transfer_settled; transfer_settled, one more | failed comes before settled | !
  transfer_settled, all pairs | failed comes before settled | !
  not_opened | the transfer was opened | !
  session_lost | unschedule | lost
replay fenced:
  planned; planned, last | its last chunk was planned | !
  pass_done; pass_done, all | no pass runs it | !
  engine_failed | Failed(engine), unschedule, Drained, free | done
  cancel | unschedule, Drained, free | done
  regrant | open, submit 0, finish | computed
  nic_fenced; nic_fenced, other; tick after 9 s | - | replay
  transfer_drained; transfer_failed | the core has had its last word on the transfer | !
  transfer_failed, all pairs | the core has had its last word on the transfer | !
  transfer_failed, no pair; transfer_settled | the core has had its last word on the transfer | !
  transfer_failed, stranded | the core has had its last word on the transfer | !
  transfer_settled, one more | the core has had its last word on the transfer | !
  transfer_settled, all pairs | the core has had its last word on the transfer | !
  not_opened | the transfer was opened | !
  refused | Failed(write), unschedule, Drained, free | done
  session_lost | unschedule, free | done
  tick after 11 s | droplink | replay
cancelling:
  planned; planned, last | not in the schedule any more | !
  pass_done; pass_done, all | - | cancelling
  engine_failed; cancel; regrant; nic_fenced; nic_fenced, other | - | cancelling
  transfer_failed, no pair; refused; tick after 9 s; tick after 11 s | - | cancelling
  transfer_failed, stranded | - | cancelling
  transfer_drained | Drained, free | done
  transfer_failed | pair down p | cancelling
  transfer_failed, all pairs | Failed(write 1) | cancelling
  transfer_settled; transfer_settled, one more | failed comes before settled | !
  transfer_settled, all pairs | failed comes before settled | !
  not_opened | the transfer was opened | !
  session_lost | unschedule | lost
cancelling in-pass:
  planned; planned, last | not in the schedule any more | !
  pass_done; pass_done, all; engine_failed; cancel; regrant; nic_fenced | - | cancelling
  nic_fenced, other; transfer_failed, no pair; refused; tick after 9 s | - | cancelling
  transfer_failed, stranded | - | cancelling
  tick after 11 s | - | cancelling
  transfer_drained | Drained | cancelling
  transfer_failed | pair down p | cancelling
  transfer_failed, all pairs | Failed(write 1) | cancelling
  transfer_settled; transfer_settled, one more | failed comes before settled | !
  transfer_settled, all pairs | failed comes before settled | !
  not_opened | the transfer was opened | !
  session_lost | unschedule | lost
cancelling told in-pass:
  planned; planned, last | not in the schedule any more | !
  pass_done; pass_done, all; engine_failed | free | done
  cancel; regrant; nic_fenced; nic_fenced, other; refused; tick after 9 s | - | cancelling
  tick after 11 s | - | cancelling
  transfer_drained; transfer_failed | the core has had its last word on the transfer | !
  transfer_failed, all pairs | the core has had its last word on the transfer | !
  transfer_failed, no pair; transfer_settled | the core has had its last word on the transfer | !
  transfer_failed, stranded | the core has had its last word on the transfer | !
  transfer_settled, one more | the core has had its last word on the transfer | !
  transfer_settled, all pairs | the core has had its last word on the transfer | !
  not_opened | the transfer was opened | !
  session_lost | unschedule | lost
cancelling unfenced:
  planned; planned, last | not in the schedule any more | !
  pass_done; pass_done, all | - | cancelling
  engine_failed; cancel; regrant; nic_fenced, other; refused; tick after 9 s | - | cancelling
  nic_fenced | Drained, free | done
  transfer_drained; transfer_failed | the core has had its last word on the transfer | !
  transfer_failed, all pairs | the core has had its last word on the transfer | !
  transfer_failed, no pair; transfer_settled | the core has had its last word on the transfer | !
  transfer_failed, stranded | the core has had its last word on the transfer | !
  transfer_settled, one more | the core has had its last word on the transfer | !
  transfer_settled, all pairs | the core has had its last word on the transfer | !
  not_opened | the transfer was opened | !
  session_lost | unschedule, free | done
  tick after 11 s | droplink | cancelling
failed:
  planned; planned, last | not in the schedule any more | !
  pass_done; pass_done, all | - | failed
  engine_failed; cancel; regrant; nic_fenced; nic_fenced, other | - | failed
  transfer_failed, no pair; refused; tick after 9 s; tick after 11 s | - | failed
  transfer_failed, stranded | - | failed
  transfer_drained | Drained, free | done
  transfer_failed | pair down p | failed
  transfer_failed, all pairs | Failed(write 1) | failed
  transfer_settled; transfer_settled, one more | failed comes before settled | !
  transfer_settled, all pairs | failed comes before settled | !
  not_opened | the transfer was opened | !
  session_lost | unschedule | lost
failed unfenced:
  planned; planned, last | not in the schedule any more | !
  pass_done; pass_done, all | - | failed
  engine_failed; cancel; regrant; nic_fenced, other; refused; tick after 9 s | - | failed
  nic_fenced | Drained, free | done
  transfer_drained; transfer_failed | the core has had its last word on the transfer | !
  transfer_failed, all pairs | the core has had its last word on the transfer | !
  transfer_failed, no pair; transfer_settled | the core has had its last word on the transfer | !
  transfer_failed, stranded | the core has had its last word on the transfer | !
  transfer_settled, one more | the core has had its last word on the transfer | !
  transfer_settled, all pairs | the core has had its last word on the transfer | !
  not_opened | the transfer was opened | !
  session_lost | unschedule, free | done
  tick after 11 s | droplink | failed
lost:
  planned; planned, last | not in the schedule any more | !
  pass_done; pass_done, all | - | lost
  engine_failed; cancel; regrant; nic_fenced; nic_fenced, other; transfer_failed | - | lost
  transfer_failed, all pairs; transfer_failed, no pair; refused; session_lost | - | lost
  transfer_failed, stranded | - | lost
  tick after 9 s; tick after 11 s | - | lost
  transfer_drained | free | done
  transfer_settled; transfer_settled, one more | failed comes before settled | !
  transfer_settled, all pairs | failed comes before settled | !
  not_opened | the transfer was opened | !
cancelling failed:
  planned; planned, last | not in the schedule any more | !
  pass_done; pass_done, all | - | cancelling
  engine_failed; cancel; regrant; nic_fenced; nic_fenced, other; transfer_settled | - | cancelling
  refused; tick after 9 s | - | cancelling
  transfer_drained; transfer_failed | failed comes once, and settled after it | !
  transfer_failed, all pairs | failed comes once, and settled after it | !
  transfer_failed, no pair | failed comes once, and settled after it | !
  transfer_failed, stranded | failed comes once, and settled after it | !
  transfer_settled, one more | pair down q | cancelling
  transfer_settled, all pairs | Failed(write 1) | cancelling
  not_opened | the transfer was opened | !
  session_lost | unschedule | lost
  tick after 11 s | droplink | cancelling
failed outstanding:
  planned; planned, last | not in the schedule any more | !
  pass_done; pass_done, all | - | failed
  engine_failed; cancel; regrant; nic_fenced; nic_fenced, other; transfer_settled | - | failed
  refused; tick after 9 s | - | failed
  transfer_drained; transfer_failed | failed comes once, and settled after it | !
  transfer_failed, all pairs | failed comes once, and settled after it | !
  transfer_failed, no pair | failed comes once, and settled after it | !
  transfer_failed, stranded | failed comes once, and settled after it | !
  transfer_settled, one more | pair down q | failed
  transfer_settled, all pairs | Failed(write 1) | failed
  not_opened | the transfer was opened | !
  session_lost | unschedule | lost
  tick after 11 s | droplink | failed
lost failed:
  planned; planned, last | not in the schedule any more | !
  pass_done; pass_done, all | - | lost
  engine_failed; cancel; regrant; nic_fenced; nic_fenced, other; refused; session_lost | - | lost
  tick after 9 s; tick after 11 s | - | lost
  transfer_drained; transfer_failed | failed comes once, and settled after it | !
  transfer_failed, all pairs | failed comes once, and settled after it | !
  transfer_failed, no pair | failed comes once, and settled after it | !
  transfer_failed, stranded | failed comes once, and settled after it | !
  transfer_settled; transfer_settled, one more; transfer_settled, all pairs | free | done
  not_opened | the transfer was opened | !
lost in-pass:
  planned; planned, last | not in the schedule any more | !
  pass_done; pass_done, all; engine_failed; cancel; regrant; nic_fenced | - | lost
  nic_fenced, other; transfer_drained; transfer_failed; transfer_failed, all pairs | - | lost
  transfer_failed, no pair; refused; session_lost; tick after 9 s; tick after 11 s | - | lost
  transfer_failed, stranded | - | lost
  transfer_settled; transfer_settled, one more | failed comes before settled | !
  transfer_settled, all pairs | failed comes before settled | !
  not_opened | the transfer was opened | !
done:
  planned; planned, last | not in the schedule any more | !
  pass_done; pass_done, all | - | done
  engine_failed; cancel; regrant; nic_fenced; nic_fenced, other; refused; session_lost | - | done
  tick after 9 s; tick after 11 s | - | done
  transfer_drained; transfer_failed | the core has had its last word on the transfer | !
  transfer_failed, all pairs | the core has had its last word on the transfer | !
  transfer_failed, no pair; transfer_settled | the core has had its last word on the transfer | !
  transfer_failed, stranded | the core has had its last word on the transfer | !
  transfer_settled, one more | the core has had its last word on the transfer | !
  transfer_settled, all pairs | the core has had its last word on the transfer | !
  not_opened | the transfer was opened | !
"""
