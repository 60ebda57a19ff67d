// The persistent kernel for models with separate norms, and with experts. Its attention has no softcaps
// and reads no KV cache in bytes.
#define NAME persistent_experts
#define LAYOUTS(DO) DO(F16) DO(S8) DO(S8X16) DO(U8) DO(U4) DO(IQ4) DO(FP4)
#define EXPERTS true
#define ANY_ATTENTION false
#include "persistent.cu"
