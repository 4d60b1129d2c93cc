"""PF1-CAUSE2: which part of the cause build removes the cost of a large context, and is the fence enough?"""
