"""The OpenAI API of one worker: conversion between text and the tokens of the engine."""
