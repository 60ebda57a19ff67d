// The persistent kernel for models with separate norms, and with experts, whose attention has softcaps or
// reads a KV cache in bytes.
#define NAME persistent_experts_softcap_q8
#define EXPERTS true
#include "persistent.cu"
