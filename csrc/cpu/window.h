// SPDX-License-Identifier: Apache-2.0
// Which tokens of a piece the members of a tile see, in layers with a sliding window.
#pragma once

#include "kernels.h"

namespace choreo {

// Index among the own tokens of the member's first query, which is the last token that it sees.
inline int64_t own_token(const Step& s, const Member& member) {
  const int q_len = s.query_start_loc[member.req + 1] - s.query_start_loc[member.req];
  return s.num_tokens[s.span_start_loc[member.req + 1] - 1] - q_len + member.query_begin;
}

// Where the member sees token `begin` of the span, less the position of its first query.
inline int64_t first_distance(const Step& s, const Member& member, int span, int begin) {
  const int own = s.span_start_loc[member.req + 1] - 1;
  const int64_t seen = int64_t{s.stored_position[span]} - s.position_delta[span] + begin;
  return seen - s.stored_position[own] - own_token(s, member);
}

// Tokens at the beginning of a piece that no query of the members sees; all later ones are seen by
// one of them at least. `span` and `begin` are those of the members' columns, see PieceView.
inline int64_t hidden_tokens(const Step& s, int window, const Member* members, int num_members,
                             const int32_t* span, const int32_t* begin, int64_t num_tokens) {
  if (window == 0) return 0;
  int64_t hidden = num_tokens;
  for (int m = 0; m < num_members; ++m) {
    const int column = members[m].column;
    const int64_t first = 1 - window - first_distance(s, members[m], span[column], begin[column]);
    if (first < hidden) hidden = first;
  }
  return hidden < 0 ? 0 : hidden;
}

}  // namespace choreo
