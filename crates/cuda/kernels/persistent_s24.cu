// The persistent kernel for models with 2:4 weights, whose other weights have plain layouts.
#define NAME persistent_s24
#define LAYOUTS(DO) DO(F16) DO(S8) DO(S24_F16) DO(S24_S8) DO(S24_S4)
#include "persistent.cu"
