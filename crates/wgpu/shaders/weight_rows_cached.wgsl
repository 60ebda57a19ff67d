    // The rows of the weight that tiles are of: those of the tile's expert, in its slot or among all
    // experts.
    if id.x >= tiles[0] {
        return;
    }
    let tile_rows = RESULT_ROWS * params[OUTPUT_WIDTH >> 2u][OUTPUT_WIDTH & 3u];
    let expert = tiles[1u + 3u * id.x];
    let slot = cache[params[CACHE_AT >> 2u][CACHE_AT & 3u] + expert];
    let has_slot = slot != NO_SLOT;
    if has_slot != (params[IS_OF_SLOTS >> 2u][IS_OF_SLOTS & 3u] != 0u) {
        return;
    }
    let place = select(expert, slot, has_slot);
    rows_to_expert = (expert - place) * params[OUTPUT_WIDTH >> 2u][OUTPUT_WIDTH & 3u];
    // Below zero, and so very large, if the expert or its slot is before this part.
    let begin = place * tile_rows - params[FIRST_ROW >> 2u][FIRST_ROW & 3u];
    if begin >= params[PART_ROWS >> 2u][PART_ROWS & 3u] {
        return;
    }
    let rows = begin + tile_rows;
