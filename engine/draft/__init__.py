"""Token trees: the protocol of a drafter, and the packages that grow trees and predict tokens."""
