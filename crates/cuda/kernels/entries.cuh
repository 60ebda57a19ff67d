// Entries of several tokens in the KV cache. Those of a page lie one after the other, each a row:
// its elements, then in the int8 layout its scales. An entry is in the page of its last token.
#pragma once
#include "kv_layout.cuh"

// Elements from an entry to the next: a multiple of sixteen bytes.
DEVICE u32 entry_elements(u32 dim) { return HAS_SCALES ? (kv_elements(dim) + 15) / 16 * 16 : kv_elements(dim); }

// The number of an entry of `ratio` tokens among those of all pages.
DEVICE u64 entry_row(const u32 *pages, u32 entry, u32 ratio) {
    u32 position = (entry + 1) * ratio - 1, per_page = (PAGE_TOKENS - 1) / ratio + 1;
    return (u64)pages[position / PAGE_TOKENS] * per_page + position % PAGE_TOKENS / ratio;
}
