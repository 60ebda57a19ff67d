// The persistent kernel for models with separate norms, and with experts. Its attention has no softcaps
// and reads no KV cache in bytes.
#define NAME persistent_experts
#define EXPERTS true
#define SOFTCAPS_AND_Q8 false
#include "persistent.cu"
