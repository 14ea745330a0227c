// A library that calls a function of its own as libtorch_cpu does, and what hydroslurm finds of that.
// For test_import_slot.py, which links it lazily and with all its addresses read-only.
#include "internal.h"

extern "C" {

int asked() { return 1; }
int somebody_elses() { return 2; }
int ask() { return asked(); }

// 0: not found.
void **slot_of(const void *function) { return hs::import_slot(function); }
}
