// The persistent kernel for models with 2:4 weights, whose other weights are of plain kinds.
#define NAME persistent_s24
#define KINDS(DO) DO(F16) DO(S8) DO(S24_F16) DO(S24_S8) DO(S24_S4)
#include "persistent.cu"
