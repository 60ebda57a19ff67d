    // The rows of the weight that tiles are of: those of the tile's expert.
    if id.x >= tiles[0] {
        return;
    }
    let tile_rows = RESULT_ROWS * params[OUTPUT_WIDTH >> 2u][OUTPUT_WIDTH & 3u];
    // Below zero, and so very large, if the expert is before this part.
    let begin = tiles[1u + 3u * id.x] * tile_rows - params[FIRST_ROW >> 2u][FIRST_ROW & 3u];
    if begin >= params[PART_ROWS >> 2u][PART_ROWS & 3u] {
        return;
    }
    let rows = begin + tile_rows;
