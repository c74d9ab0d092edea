"""Facts about the nodes of a Dynamo graph, for several passes: kinds, values, work, look-ups, quotients."""
