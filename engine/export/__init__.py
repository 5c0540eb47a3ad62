"""Export of a finished model: conversion to other weight formats, publication, gates, and descriptions of
weight files."""
