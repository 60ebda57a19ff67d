// The persistent kernel for models with separate norms, and with experts, whose attention has softcaps or
// reads a KV cache in bytes.
#define NAME persistent_experts_q8
#define LAYOUTS(DO) DO(F16) DO(S8) DO(S8X16) DO(U8) DO(U4) DO(IQ4) DO(FP4)
#define EXPERTS true
#include "persistent.cu"
