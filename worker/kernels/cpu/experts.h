// Which experts each row takes, and the rows of each expert side by side, so that its weights are read once for all of them.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "product.h"

namespace upbeat {

// Rows by expert. A pair is one of a row's experts, the most probable first: pair `row * per_token + rank`.
struct Routes {
    std::vector<Group> groups;   // of the experts that some row takes, in ascending order
    std::vector<int> experts;    // of each group
    std::vector<int> pairs;      // in the groups' order
    std::vector<int> places;     // of each pair in that order
    std::vector<float> weights;  // of each pair
};

// The `per_token` largest probabilities (softmax of `logits [rows, experts]`) of each row, divided by their sum if `norm`, rounded to W. Of
// equal ones the first counts.
template <typename W>
Routes routes_of(Team& team, const float* logits, int rows, int experts, int per_token, bool norm) {
    const int count = rows * per_token;
    std::vector<int> chosen(count), first(experts + 1);
    Routes r;
    r.weights.resize(count);
    team.split(rows, [&](int row) {
        const float* from = logits + long(row) * experts;
        const float highest = *std::max_element(from, from + experts);
        std::vector<float> share(experts);
        std::vector<char> taken(experts);
        float total = 0, sum = 0;
        for (int e = 0; e < experts; e++) total += share[e] = std::exp(from[e] - highest);
        for (int rank = 0; rank < per_token; rank++) {
            int best = -1;
            for (int e = 0; e < experts; e++)
                if (!taken[e] && (best < 0 || share[e] > share[best])) best = e;
            taken[best] = 1;
            chosen[row * per_token + rank] = best;
            sum += r.weights[row * per_token + rank] = share[best] / total;
        }
        for (int rank = 0; rank < per_token; rank++) {
            float& weight = r.weights[row * per_token + rank];
            weight = W::one(W::of(norm ? weight / sum : weight));
        }
    });
    for (int expert : chosen) first[expert + 1]++;
    for (int e = 0; e < experts; e++) {
        if (first[e + 1]) r.groups.push_back({first[e], first[e + 1]}), r.experts.push_back(e);
        first[e + 1] += first[e];
    }
    r.pairs.resize(count);
    r.places.resize(count);
    for (int pair = 0; pair < count; pair++) r.pairs[r.places[pair] = first[chosen[pair]]++] = pair;
    return r;
}

}  // namespace upbeat
