// The persistent kernel for models some of whose experts are only in memory of the host.
#define NAME persistent_cached
#define CACHES_EXPERTS true
#define LAYOUTS(DO) DO(F16) DO(S8) DO(S8X16) DO(U8) DO(U4) DO(IQ4) DO(FP4)
#define EXPERTS true
#include "persistent.cu"
