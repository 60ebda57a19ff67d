// Prefill attention by `wgmma` with a KV cache of bytes with scales.
#define KV_Q8
#include "prefill_attention_wgmma.cu"
