// The persistent kernel for models some of whose experts are only in memory of the host.
#define NAME persistent_cached
#define CACHES_EXPERTS true
#define EXPERTS true
#include "persistent.cu"
